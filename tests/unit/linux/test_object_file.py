"""Object files: instructions without file descriptors, and back; a damaged file."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf.object_file import (
    MapDeclaration,
    ObjectFile,
    ProgramCode,
    Relocation,
    decode,
    digest,
    encode,
    relocated,
    without_file_descriptors,
)

PLACEHOLDER = 0x5EED0001
FILE = ObjectFile(
    "ab",
    "GPL",
    (MapDeclaration("slots", 2, 4, 4, 64, 0, ""),),
    (ProgramCode("connect4", bytes(8), {0: "slots"}),),
)


def instruction(code: int, registers: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("=BBhi", code, registers, 0, immediate)


def wide(registers: int, immediate: int) -> bytes:
    """A load of 64 bits, which takes two slots."""
    return instruction(0x18, registers, immediate) + bytes(8)


LOAD_MAP = 0x11  # r1, with BPF_PSEUDO_MAP_FD as the source register
LOAD_NUMBER = 0x01


def test_a_file_descriptor_becomes_the_name_of_its_map() -> None:
    code = instruction(0xB7) + wide(LOAD_MAP, 7) + wide(LOAD_MAP, 9)
    found = without_file_descriptors("connect4", code, {7: "slots", 9: "endpoints"})
    assert found.maps == {1: "slots", 3: "endpoints"}
    assert found.instructions == instruction(0xB7) + wide(LOAD_MAP, 0) + wide(LOAD_MAP, 0)


def test_the_loader_fills_in_descriptors_and_numbers() -> None:
    program = ProgramCode("to_any", wide(LOAD_MAP, 0) + wide(LOAD_NUMBER, PLACEHOLDER), {0: "slots"})
    code = relocated(program, Relocation({"slots": 5}, {PLACEHOLDER: 4_000_000_000}))
    assert code == wide(LOAD_MAP, 5) + instruction(0x18, LOAD_NUMBER, 4_000_000_000 - (1 << 32)) + bytes(8)


def test_the_second_slot_of_a_load_is_not_taken_for_an_instruction() -> None:
    """Its first byte is the code of a load here, as the upper half of a number may be."""
    second = instruction(0x18, LOAD_NUMBER, PLACEHOLDER)
    program = ProgramCode("to_any", instruction(0x18, LOAD_NUMBER, 1) + second, {})
    assert relocated(program, Relocation({}, {PLACEHOLDER: 3})) == program.instructions


def test_a_number_that_is_no_placeholder_stays() -> None:
    program = ProgramCode("to_any", wide(LOAD_NUMBER, 64), {})
    assert relocated(program, Relocation({}, {PLACEHOLDER: 3})) == program.instructions


def test_the_digest_depends_on_source_and_settings_but_not_on_their_order() -> None:
    assert digest("int a;", {"A": "1", "B": "2"}) == digest("int a;", {"B": "2", "A": "1"})
    assert len({digest("int a;", {}), digest("int b;", {}), digest("int a;", {"A": "1"})}) == 3


def test_an_encoded_file_is_decoded_to_the_same() -> None:
    assert decode(encode(FILE)) == FILE


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    content = bytearray(encode(FILE))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Rejected):
        decode(bytes(content))


@pytest.mark.parametrize("length", [0, 10, 40])
def test_a_truncated_file_is_noticed(length: int) -> None:
    with pytest.raises(Rejected):
        decode(encode(FILE)[:length])
