"""Rules of nf_tables as values, and the fields that rules can match, by nft's words for them."""

from typing import NamedTuple

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.expressions import Base, Ct, Expression, Fib, Meta, MetaKey, Numgen, Payload
from ebpfproxy.linux.nft.sets import Declaration, SetElement
from ebpfproxy.linux.nft.types import Datatype


class AnonymousSet(NamedTuple):
    """A set that belongs to one rule, and is deleted with it."""

    declaration: Declaration
    elements: tuple[SetElement, ...]


class Rule(NamedTuple):
    """A rule. `sets`: its anonymous sets. An expression that uses the first of them has the `set_id` 1, and
    so on."""

    expressions: tuple[Expression, ...]
    comment: str = ""
    sets: tuple[AnonymousSet, ...] = ()


class Field(NamedTuple):
    """A field that rules can match. `load` loads it into slot 0."""

    words: str
    type: Datatype
    load: Payload | Meta | Ct | Fib | Numgen


_STATE, _STATUS = 0, 2  # NFT_CT_*
_ADDRESS_TYPE = 3  # NFT_FIB_RESULT_ADDRTYPE
_OF_SOURCE, _OF_DESTINATION = 1, 2  # NFTA_FIB_F_SADDR, NFTA_FIB_F_DADDR
_RANDOM = 1  # NFT_NG_RANDOM

FIELDS = {
    each.words: each
    for each in (
        Field("ip saddr", types.IPV4, Payload(0, Base.NETWORK, 12, 4)),
        Field("ip daddr", types.IPV4, Payload(0, Base.NETWORK, 16, 4)),
        Field("ip6 saddr", types.IPV6, Payload(0, Base.NETWORK, 8, 16)),
        Field("ip6 daddr", types.IPV6, Payload(0, Base.NETWORK, 24, 16)),
        Field("th dport", types.PORT, Payload(0, Base.TRANSPORT, 2, 2)),
        Field("meta l4proto", types.PROTOCOL, Meta(0, MetaKey.PROTOCOL)),
        Field("meta mark", types.MARK, Meta(0, MetaKey.MARK)),
        Field("iifname", types.DEVICE, Meta(0, MetaKey.INPUT_NAME)),
        Field("ct state", types.STATE, Ct(0, _STATE)),
        Field("ct status", types.STATUS, Ct(0, _STATUS)),
        Field("fib saddr type", types.ADDRESS_TYPE, Fib(0, _ADDRESS_TYPE, _OF_SOURCE)),
        Field("fib daddr type", types.ADDRESS_TYPE, Fib(0, _ADDRESS_TYPE, _OF_DESTINATION)),
    )
}


def random_number(modulus: int) -> Field:
    """A random number from 0 to `modulus` - 1 for each packet."""
    return Field(f"numgen random mod {modulus}", types.INTEGER, Numgen(0, modulus, _RANDOM, 0))
