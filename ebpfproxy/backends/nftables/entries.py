"""The entries of the nftables backend, by key: the objects of the table, and what the relay holds.

Rules are compared by the digests of their texts (`linux.nft.rule`). Endpoints are packed bytes. Everything
else is text in the form that `nft -y -T list table` prints (1.0.6; priorities as numbers, times in
seconds). So an object that was written and read back is equal. The text is also the input of `nft -f`:

    add chain F kube-proxy NAME { HOOK }             a base chain; without the braces if `hook` is ""
    add rule F kube-proxy NAME RULE                  each of `rules`, in order
    add set|map F kube-proxy NAME { DECLARATION }
    add flowtable F kube-proxy NAME { DECLARATION }
    add flowtable F kube-proxy NAME { devices = { DEVICE } }
    add element F kube-proxy CONTAINER { KEY comment "COMMENT" : VERDICT }

Verdicts of elements and rules refer to chains, and rules refer to sets and maps. A plan renders its own
objects (names with a "/"), the maps that it uses, its lists of endpoints, and its elements in the shared
containers. The node renders shared containers and chains. Elements of a dynamic set are added by the kernel
and are not entries.

A declaration never changes, since everything that a plan may change is in rules and elements. So an existing
set or map, including kube-proxy's, is never recreated. A base chain may be: older versions of kube-proxy use
other priorities, and a priority cannot be changed in place.
"""

import functools
from typing import Literal, NamedTuple

from ebpfproxy.backends.userspace import entries as relay
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family


class Chain(NamedTuple):
    family: Family
    name: str
    kind: Literal["chain"] = "chain"

    def __str__(self) -> str:
        return f"{nft_family(self.family)} {self.kind} {self.name}"


class Set(NamedTuple):
    family: Family
    name: str
    kind: Literal["set"] = "set"

    def __str__(self) -> str:
        return f"{nft_family(self.family)} {self.kind} {self.name}"


class Map(NamedTuple):
    family: Family
    name: str
    kind: Literal["map"] = "map"

    def __str__(self) -> str:
        return f"{nft_family(self.family)} {self.kind} {self.name}"


class Element(NamedTuple):
    """An element of a set or map. `container` is its name; `key` is for example "10.96.0.10 . udp . 53" or
    "10.96.0.10".
    """

    family: Family
    container: str
    key: str

    def __str__(self) -> str:
        return f"{nft_family(self.family)} element {self.container} {self.key}"


class Endpoints(NamedTuple):
    """The endpoints that one chain selects from. `identity`: 8 bytes, which differ for each chain.

    Its entry has the endpoints in their order: each is an address of 4 or 16 bytes, a port of 2, and 2
    zeros. They are elements of the map `container`. Zeros are a place without an element, which was read
    from the kernel.
    """

    family: Family
    identity: bytes

    @property
    def map(self) -> Map:
        """The map that has the elements."""
        return endpoint_maps(self.family)[self.identity[0] % ENDPOINT_MAPS]

    @property
    def container(self) -> str:
        return self.map.name

    def __str__(self) -> str:
        return f"{nft_family(self.family)} endpoints {self.identity.hex()}"


class Flowtable(NamedTuple):
    family: Family
    name: str
    kind: Literal["flowtable"] = "flowtable"

    def __str__(self) -> str:
        return f"{nft_family(self.family)} {self.kind} {self.name}"


class FlowtableDevice(NamedTuple):
    """A device of a flowtable. `flowtable` and `device` are names.

    Its entry is the ifindex, so that a device differs from an earlier one of the same name, whose end the
    kernel does not report.
    """

    family: Family
    flowtable: str
    device: str

    def __str__(self) -> str:
        return f"{nft_family(self.family)} device {self.device} of flowtable {self.flowtable}"


class ChainEntry(NamedTuple):
    """`hook` is for example "type filter hook input priority 0; policy accept;", "" for a regular chain."""

    hook: str
    rules: tuple[Rule, ...] = ()


class ElementEntry(NamedTuple):
    """`verdict` is for example "drop" or "goto reject-chain", and "" in a set. `comment` has no quotes; ""
    for none.
    """

    verdict: str = ""
    comment: str = ""


RelayKey = relay.Key
RelayEntry = relay.Entry
"""What the relay of NodePorts at loopback holds."""

Key = Chain | Set | Map | Element | Endpoints | Flowtable | FlowtableDevice | RelayKey
Entry = ChainEntry | ElementEntry | str | bytes | int | RelayEntry
"""For a Set, a Map or a Flowtable, its declaration, for example "type ipv4_addr; size 65535;
flags dynamic,timeout;". For Endpoints, their addresses and ports. For a FlowtableDevice, its ifindex.
"""

ENDPOINT_MAPS = 256
"""The maximum number of maps of endpoints in each family.

For each new element, the kernel walks over all rules that use the map, and for each new rule over all
elements (nft_add_set_elem(), nf_tables_bind_set()). With one map, 10,000 Services of 10 endpoints take 29 s.
"""

TABLE = "kube-proxy"

_NFT_FAMILIES = {Family.IPV4: "ip", Family.IPV6: "ip6"}


def nft_family(family: Family) -> str:
    return _NFT_FAMILIES[family]


@functools.cache
def endpoint_maps(family: Family) -> tuple[Map, ...]:
    """The maps of endpoints of a family. All plans share these objects."""
    return tuple(Map(family, f"endpoints-{number:03}") for number in range(ENDPOINT_MAPS))


def endpoint_bytes(family: Family) -> int:
    """The length of one endpoint in the entry of `Endpoints`."""
    return 8 if family is Family.IPV4 else 20


def endpoint_map(family: Family) -> str:
    """The declaration of a map of endpoints. nft shows the numbers of the key as `numgen`."""
    address = "ipv4_addr" if family is Family.IPV4 else "ipv6_addr"
    return f"type mark . mark . mark : {address} . inet_service;"
