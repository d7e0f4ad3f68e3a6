"""Attributes and verdicts of nf_tables. Source: include/uapi/linux/netfilter/nf_tables.h."""

import enum
import struct
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import attribute, attributes, text

NESTED = 0x8000
_U32 = struct.Struct(">I")
_U32_HEADS = [attribute(kind, bytes(4))[:4] for kind in range(32)]
_I32 = struct.Struct(">i")


class Code(enum.IntEnum):
    """NF_DROP, NF_ACCEPT and NFT_*."""

    DROP = 0
    ACCEPT = 1
    JUMP = -3
    GOTO = -4
    RETURN = -5


class Verdict(NamedTuple):
    """`chain` is "" unless the code is JUMP or GOTO."""

    code: int
    chain: str = ""


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute that contains other attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def u32(kind: int, value: int) -> bytes:
    """A number; all numbers of nf_tables are in network byte order."""
    return _U32_HEADS[kind] + _U32.pack(value)


def name(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def number(value: bytes | None) -> int:
    """The number in an attribute; 0 if the attribute is missing."""
    return int.from_bytes(value) if value else 0


def encode_verdict(verdict: Verdict) -> bytes:
    """NFTA_DATA_VERDICT."""
    chain = name(2, verdict.chain) if verdict.chain else b""
    return nested(2, attribute(1, _I32.pack(verdict.code)), chain)


def decode_verdict(data: bytes) -> Verdict:
    """The verdict in the value of NFTA_DATA_VERDICT."""
    found = dict(attributes(data, 0))
    return Verdict(_I32.unpack(found[1])[0], text(found.get(2)))
