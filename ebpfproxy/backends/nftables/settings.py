"""The settings of the nftables backend."""

import dataclasses

from ebpfproxy.backends.userspace.entries import UserspaceSettings
from ebpfproxy.model.address import Family


@dataclasses.dataclass(frozen=True, slots=True)
class NftablesSettings:
    """Settings of the nftables backend.

    - `masquerade_bit`: the bit of the packet mark that requests masquerading, 0 to 31.
    - `flowtable`: established flows of Services are forwarded by a flowtable, at devices of the plan.
    - `localhost`: the families in which NodePorts answer on 127.0.0.1 and ::1.
    - `relay`: what the relay of these NodePorts needs.
    """

    masquerade_bit: int = 14
    flowtable: bool = False
    localhost: frozenset[Family] = frozenset()
    relay: UserspaceSettings = dataclasses.field(default_factory=UserspaceSettings)

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit
