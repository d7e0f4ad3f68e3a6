"""The expressions that rules of nf_tables are made of, as values.

A rule is a list of them. Most load something into registers, or look at what is there: sixteen slots of four
bytes each; the verdict has a register of its own. Source: include/uapi/linux/netfilter/nf_tables.h.
"""

import enum
from typing import NamedTuple

VERDICT_REGISTER = -1
"""In place of a slot: where a map of verdicts leads to."""


class Base(enum.IntEnum):
    """Where a payload is counted from: NFT_PAYLOAD_*."""

    NETWORK = 1
    TRANSPORT = 2


class MetaKey(enum.IntEnum):
    """NFT_META_*."""

    MARK = 3
    INPUT_NAME = 6
    PROTOCOL = 16


class Comparison(enum.IntEnum):
    """NFT_CMP_*, of which NFT_RANGE_* has the first two."""

    EQUAL = 0
    UNEQUAL = 1
    AT_MOST = 3
    AT_LEAST = 5


class Code(enum.IntEnum):
    """NF_DROP, NF_ACCEPT and NFT_*."""

    DROP = 0
    ACCEPT = 1
    JUMP = -3
    GOTO = -4
    RETURN = -5


class Payload(NamedTuple):
    """`length` bytes of the packet, from `offset` on."""

    slot: int
    base: int
    offset: int
    length: int


class Meta(NamedTuple):
    slot: int
    key: int


class SetMeta(NamedTuple):
    slot: int
    key: int


class Ct(NamedTuple):
    """What conntrack knows: NFT_CT_*."""

    slot: int
    key: int


class Fib(NamedTuple):
    """What the routes say of an address: `result` is NFT_FIB_RESULT_*, `flags` are NFTA_FIB_F_*."""

    slot: int
    result: int
    flags: int


class Numgen(NamedTuple):
    """`kind` is NFT_NG_*."""

    slot: int
    modulus: int
    kind: int
    offset: int


class Bitwise(NamedTuple):
    """What is in a slot, `& mask ^ xor`."""

    slot: int
    target: int
    mask: bytes
    xor: bytes


class Compare(NamedTuple):
    slot: int
    how: int
    value: bytes


class InRange(NamedTuple):
    slot: int
    how: int
    low: bytes
    high: bytes


class Load(NamedTuple):
    """A constant."""

    slot: int
    value: bytes


class Verdict(NamedTuple):
    """What becomes of the packet; `chain` is "" where none is gone to."""

    code: int
    chain: str = ""


class Lookup(NamedTuple):
    """`target`: where what a map says goes to; None for a set. `set_id` is that of a set made in the same
    transaction, 0 for one that has its name already."""

    set_name: str
    slot: int
    target: int | None = None
    set_id: int = 0
    inverted: bool = False


class Nat(NamedTuple):
    """`kind` is NFT_NAT_*, `family` an NFPROTO_*; slots, None where it does not matter. `flags` are
    NF_NAT_RANGE_*, without those two that follow from the slots."""

    kind: int
    family: int
    address: int | None
    port: int | None
    flags: int = 0


class Masquerade(NamedTuple):
    flags: int


class Reject(NamedTuple):
    """`kind` is NFT_REJECT_*, `code` that of ICMP."""

    kind: int
    code: int


class Dynset(NamedTuple):
    """Put what is in a slot into a set. `how` is NFT_DYNSET_OP_*, `timeout` in milliseconds, 0 for the
    set's own."""

    set_name: str
    how: int
    slot: int
    timeout: int = 0


class Other(NamedTuple):
    """One that is not known, or has something that is not."""

    name: str
    data: bytes


Expression = (
    Payload
    | Meta
    | SetMeta
    | Ct
    | Fib
    | Numgen
    | Bitwise
    | Compare
    | InRange
    | Load
    | Verdict
    | Lookup
    | Nat
    | Masquerade
    | Reject
    | Dynset
    | Other
)
