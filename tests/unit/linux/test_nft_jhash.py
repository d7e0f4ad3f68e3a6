"""The numbers of jhash; tests/kernel/test_nftables_balancing.py compares them with the kernel's."""

import pytest

from ebpfproxy.linux.nft.jhash import jhash

SEED = 0x65627066
DATA = bytes((37 * number + 5) % 256 for number in range(32))


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, 0x2B6408F6),
        (4, 0x28F55776),
        (8, 0x5397B7D1),
        (12, 0x11541613),
        (13, 0xCEAF9C7A),
        (20, 0x907C9FDA),
        (24, 0xEF15E578),
        (32, 0x634159E5),
    ],
)
def test_the_hash_is_that_of_the_kernel(length: int, expected: int) -> None:
    """`expected` is from a C program with jhash() of Linux, on a little-endian machine."""
    assert jhash(DATA[:length], 1 << 32, SEED) == expected


def test_the_number_is_less_than_the_modulus() -> None:
    numbers = {jhash(bytes((number, 1, 2, 3)), 7, SEED) for number in range(200)}
    assert numbers == set(range(7))
