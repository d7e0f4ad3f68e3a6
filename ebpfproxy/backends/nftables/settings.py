"""The settings of the nftables backend."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class NftablesSettings:
    """Settings of the nftables backend. `masquerade_bit`: the bit of the packet mark that requests
    masquerading, 0 to 31.
    """

    masquerade_bit: int = 14

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
