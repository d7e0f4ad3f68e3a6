"""The settings of the nftables backend."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class NftablesSettings:
    """`masquerade_bit`, 0 to 31: which bit of a packet's mark says that it shall be masqueraded."""

    masquerade_bit: int = 14

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
