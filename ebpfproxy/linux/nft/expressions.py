"""The expressions of nf_tables rules, as values.

A rule is a list of expressions. Most of them load data into registers, or use the data there. There are
sixteen slots of four bytes each, and a register for the verdict. Source:
include/uapi/linux/netfilter/nf_tables.h.
"""

import enum
from typing import NamedTuple

VERDICT_REGISTER = -1
"""Used instead of a slot, as the target of a verdict map lookup."""


class Base(enum.IntEnum):
    """The header at which a payload offset starts: NFT_PAYLOAD_*."""

    NETWORK = 1
    TRANSPORT = 2


class MetaKey(enum.IntEnum):
    """NFT_META_*."""

    MARK = 3
    INPUT_NAME = 6
    PROTOCOL = 16


class Comparison(enum.IntEnum):
    """NFT_CMP_*. NFT_RANGE_* has the first two."""

    EQUAL = 0
    UNEQUAL = 1
    LESS = 2
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
    """Load `length` bytes of the packet, from `offset` on."""

    slot: int
    base: int
    offset: int
    length: int


class SetPayload(NamedTuple):
    """Write `length` bytes of the slot to the packet, from `offset` on.

    `checksum`: the offset of the checksum to update, from the same header on; None to update none.
    """

    slot: int
    base: int
    offset: int
    length: int
    checksum: int | None


class Meta(NamedTuple):
    """Load metadata of the packet: NFT_META_*."""

    slot: int
    key: int


class SetMeta(NamedTuple):
    """Write the slot to metadata of the packet."""

    slot: int
    key: int


class Ct(NamedTuple):
    """Load data of the conntrack entry: NFT_CT_*."""

    slot: int
    key: int


class Fib(NamedTuple):
    """Look up an address in the routing tables. `result` is NFT_FIB_RESULT_*, `flags` are NFTA_FIB_F_*."""

    slot: int
    result: int
    flags: int


class Numgen(NamedTuple):
    """Load a generated number. `kind` is NFT_NG_*."""

    slot: int
    modulus: int
    kind: int
    offset: int


class Hash(NamedTuple):
    """Load the Jenkins hash of `length` bytes, from slot `source` on: a number less than `modulus`."""

    source: int
    slot: int
    length: int
    modulus: int
    seed: int


class NetworkOrder(NamedTuple):
    """Convert the number in a slot to network byte order, in which numbers can be compared."""

    slot: int


class Bitwise(NamedTuple):
    """Store `slot & mask ^ xor` in `target`."""

    slot: int
    target: int
    mask: bytes
    xor: bytes


class Compare(NamedTuple):
    """End the rule unless the comparison is true."""

    slot: int
    how: int
    value: bytes


class InRange(NamedTuple):
    """End the rule unless the slot is in (EQUAL) or outside (UNEQUAL) the range."""

    slot: int
    how: int
    low: bytes
    high: bytes


class Load(NamedTuple):
    """Load a constant."""

    slot: int
    value: bytes


class Verdict(NamedTuple):
    """Set the verdict. `chain` is "" unless the code is JUMP or GOTO."""

    code: int
    chain: str = ""


class Lookup(NamedTuple):
    """Look up a slot in a set or map.

    `target`: the slot for the value of a map, None for a set. `set_id` identifies a set that is created in
    the same transaction; 0 if the set is identified by its name.
    """

    set_name: str
    slot: int
    target: int | None = None
    set_id: int = 0
    inverted: bool = False


class Nat(NamedTuple):
    """Translate the packet. `kind` is NFT_NAT_*, `family` an NFPROTO_*.

    `address` and `port` are slots, None if not translated. `flags` are NF_NAT_RANGE_*, without the two that
    follow from the slots.
    """

    kind: int
    family: int
    address: int | None
    port: int | None
    flags: int = 0


class Masquerade(NamedTuple):
    """Masquerade the packet. `flags` are NF_NAT_RANGE_*."""

    flags: int


class Reject(NamedTuple):
    """Reject the packet. `kind` is NFT_REJECT_*, `code` that of ICMP."""

    kind: int
    code: int


class Dynset(NamedTuple):
    """Add the slot to a set or map, or delete it there. `how` is NFT_DYNSET_OP_*.

    `timeout` is in milliseconds, 0 for the set's timeout. `data`: the slot of the value, for a map; also if
    `how` is a deletion (nft_dynset_init()).
    """

    set_name: str
    how: int
    slot: int
    timeout: int = 0
    data: int | None = None


Expression = (
    Payload
    | SetPayload
    | Meta
    | SetMeta
    | Ct
    | Fib
    | Numgen
    | Hash
    | NetworkOrder
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
)
