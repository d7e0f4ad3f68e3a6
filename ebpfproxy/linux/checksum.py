"""The checksum of packet headers."""

import struct


def internet_checksum(data: bytes) -> int:
    """Return the checksum of RFC 1071, 0 to 0xFFFF, in host order. The field itself counts as 0 in `data`."""
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
