"""The entries of the nftables backend, by key: the objects of the table as text of `nft`.

All text is in the form that `nft -y -T list table` prints (1.0.6; priorities as numbers, times in seconds).
So an object that was written and read back is equal. It is also the input of `nft -f`:

    add chain F kube-proxy NAME { HOOK }             a base chain; without the braces if `hook` is ""
    add rule F kube-proxy NAME RULE                  each of `rules`, in order
    add set|map F kube-proxy NAME { DECLARATION }
    add element F kube-proxy CONTAINER { KEY comment "COMMENT" : VERDICT }

Verdicts of elements and rules refer to chains, and rules refer to sets and maps. A plan renders its own
objects (names with a "/") and its elements in the shared containers. The node renders shared containers and
chains. Elements of a dynamic set are added by the kernel and are not entries.

A declaration never changes, since everything that a plan may change is in rules and elements. So an existing
set or map, including kube-proxy's, is never recreated. A base chain may be: older versions of kube-proxy use
other priorities, and a priority cannot be changed in place.
"""

from typing import Literal, NamedTuple

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


class ChainEntry(NamedTuple):
    """`hook` is for example "type filter hook input priority 0; policy accept;", "" for a regular chain."""

    hook: str
    rules: tuple[str, ...]


class ElementEntry(NamedTuple):
    """`verdict` is for example "drop" or "goto reject-chain", and "" in a set. `comment` has no quotes; ""
    for none.
    """

    verdict: str = ""
    comment: str = ""


Key = Chain | Set | Map | Element
Entry = ChainEntry | ElementEntry | str
"""For a Set or a Map, its declaration, for example "type ipv4_addr; size 65535; flags dynamic,timeout;"."""

TABLE = "kube-proxy"

_NFT_FAMILIES = {Family.IPV4: "ip", Family.IPV6: "ip6"}


def nft_family(family: Family) -> str:
    return _NFT_FAMILIES[family]
