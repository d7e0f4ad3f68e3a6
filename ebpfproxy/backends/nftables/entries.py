"""What the nftables backend holds, by key: the objects of our table, as text that `nft` takes and gives.

All text is in the form that `nft -y -T list table` prints (1.0.6; priorities are numbers then, and times are
seconds), so that what was written and read back is equal. It is also what `nft -f` takes:

    add chain F kube-proxy NAME { HOOK }             a base chain; without the braces where `hook` is ""
    add rule F kube-proxy NAME RULE                  each of `rules`, in order
    add set|map F kube-proxy NAME { DECLARATION }
    add element F kube-proxy CONTAINER { KEY comment "COMMENT" : VERDICT }

What refers to what: verdicts of elements and rules name chains, rules name sets and maps. All of a plan's
own objects (names with a "/" in them, and its elements in the shared containers) are entries of that plan;
shared containers and chains are entries of the node. Elements of a dynamic set are the kernel's business
and no entries.

A declaration is the same for all time: all that a plan may change stands in rules and elements, so a set
or a map that is there need never be made again, be it ours or kube-proxy's. Not so a base chain: older
versions of kube-proxy have some at other priorities, and a priority cannot be changed in place.
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
    """`container` is the name of a set or a map; `key` such as "10.96.0.10 . udp . 53" or "10.96.0.10"."""

    family: Family
    container: str
    key: str

    def __str__(self) -> str:
        return f"{nft_family(self.family)} element {self.container} {self.key}"


class ChainEntry(NamedTuple):
    """`hook` such as "type filter hook input priority 0; policy accept;", "" for a regular chain."""

    hook: str
    rules: tuple[str, ...]


class ElementEntry(NamedTuple):
    """`verdict` such as "drop" or "goto reject-chain", "" in a set; `comment` without quotes, "" for none."""

    verdict: str = ""
    comment: str = ""


Key = Chain | Set | Map | Element
Entry = ChainEntry | ElementEntry | str
"""For a Set or a Map its declaration, such as "type ipv4_addr; size 65535; flags dynamic,timeout;"."""

TABLE = "kube-proxy"

_NFT_FAMILIES = {Family.IPV4: "ip", Family.IPV6: "ip6"}


def nft_family(of: Family) -> str:
    return _NFT_FAMILIES[of]
