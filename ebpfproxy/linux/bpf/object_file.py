"""Compiled BPF programs as a file: their instructions, and the maps and numbers that the loader fills in.

It is written by the compiler and read by the loader. It holds nothing that depends on one machine: neither
file descriptors nor the sizes of maps.
"""

import hashlib
import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ebpfproxy.errors import Rejected

FORMAT = 1
"""Part of each digest. Increase it when the structs below change their meaning."""

_INSTRUCTION = struct.Struct("=BBhi")  # struct bpf_insn: code, registers, offset, immediate
_LOAD_64 = 0x18  # BPF_LD | BPF_IMM | BPF_DW, an instruction of two slots
_PSEUDO_MAP_FD = 1  # the source register of a _LOAD_64 whose immediate is a map's file descriptor
_CHECKSUM = 32  # bytes of SHA-256


class MapDeclaration(msgspec.Struct, frozen=True):
    """A map as the source declares it. `inner`: for an array of maps, the name of the map that its entries
    are like; otherwise ""."""

    name: str
    type: int
    key_size: int
    value_size: int
    entries: int
    flags: int
    inner: str


class ProgramCode(msgspec.Struct, frozen=True):
    """One function. `maps`: by the index of an instruction, the map whose file descriptor it loads."""

    name: str
    instructions: bytes
    maps: dict[int, str]


class ObjectFile(msgspec.Struct, frozen=True):
    """All functions and maps of one compilation. `digest`: of the source and all settings, in hex."""

    digest: str
    license: str
    maps: tuple[MapDeclaration, ...]
    programs: tuple[ProgramCode, ...]

    def program(self, name: str) -> ProgramCode | None:
        return next((program for program in self.programs if program.name == name), None)


class Relocation(NamedTuple):
    """What the loader fills in. `maps`: file descriptors by map name. `numbers`: values by the placeholder
    that the source has for them (`enum placeholder` in bpf/abi.h)."""

    maps: Mapping[str, int]
    numbers: Mapping[int, int]


def digest(source: str, defines: Mapping[str, str]) -> str:
    """The digest of an object file that is compiled from this text with these macros."""
    settings = sorted(defines.items())
    return hashlib.sha256(repr((FORMAT, source, settings)).encode()).hexdigest()


def without_file_descriptors(name: str, instructions: bytes, maps: Mapping[int, str]) -> ProgramCode:
    """Instructions as bcc returns them, with each file descriptor replaced by a reference to its map.

    `maps`: map names by file descriptor.
    """
    code = bytearray(instructions)
    used = {}
    for at, registers, immediate in _wide_loads(code):
        if registers >> 4 == _PSEUDO_MAP_FD:
            used[at] = maps[immediate]
            struct.pack_into("=i", code, at * 8 + 4, 0)
    return ProgramCode(name, bytes(code), used)


def relocated(program: ProgramCode, relocation: Relocation) -> bytes:
    """The instructions for the kernel."""
    code = bytearray(program.instructions)
    for at, name in program.maps.items():
        struct.pack_into("=i", code, at * 8 + 4, relocation.maps[name])
    for at, registers, immediate in _wide_loads(code):
        if registers >> 4 == 0 and immediate in relocation.numbers:
            struct.pack_into("=I", code, at * 8 + 4, relocation.numbers[immediate])
    return bytes(code)


def _wide_loads(code: bytes | bytearray) -> list[tuple[int, int, int]]:
    """Index, registers and immediate of each load of 64 bits."""
    found, at, count = [], 0, len(code) // 8
    while at < count:
        operation, registers, _, immediate = _INSTRUCTION.unpack_from(code, at * 8)
        if operation == _LOAD_64:
            found.append((at, registers, immediate))
        at += 2 if operation == _LOAD_64 else 1
    return found


def encode(file: ObjectFile) -> bytes:
    """A checksum and the content."""
    content = msgspec.msgpack.encode(file)
    return hashlib.sha256(content).digest() + content


def decode(data: bytes) -> ObjectFile:
    """Raises Rejected if the data is damaged or of another format."""
    checksum, content = data[:_CHECKSUM], data[_CHECKSUM:]
    if hashlib.sha256(content).digest() != checksum:
        raise Rejected("the checksum differs")
    try:
        return msgspec.msgpack.decode(content, type=ObjectFile)
    except msgspec.MsgspecError as failure:
        raise Rejected(str(failure)) from failure
