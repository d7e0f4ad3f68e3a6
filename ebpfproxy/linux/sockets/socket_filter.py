"""Classic BPF programs of sockets: filters of arriving packets, and the choice within a group of sockets.

Any process may attach such programs to its own sockets. They see a packet from its transport header on. The
offsets below are relative to the network header, and to attributes of the packet.

Sources: Documentation/networking/filter.rst; include/uapi/linux/filter.h; socket(7) for SO_ATTACH_FILTER and
SO_ATTACH_REUSEPORT_CBPF; bpf_convert_filter() in net/core/filter.c.
"""

import ctypes
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.model.address import V4_BITS, Address, Family, Network, network_family

_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 27, 51
_LD_W_ABS = 0x20
_AND_K, _JA, _JEQ_K, _RET_K, _RET_A = 0x54, 0x05, 0x15, 0x06, 0x16
_XOR_X, _MUL_K, _RSH_K, _MOD_K, _TAX = 0xAC, 0x24, 0x74, 0x94, 0x07
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_INTERFACE = 0xFFFFF000 + 8  # SKF_AD_OFF + SKF_AD_IFINDEX
_SOURCE = {Family.IPV4: (12, 1), Family.IPV6: (8, 4)}
_DESTINATION = {Family.IPV4: (16, 1), Family.IPV6: (24, 4)}
"""The offset of the address in the network header, and its size in words of 32 bits."""
_VERSION_MASK = 0xF0000000
_VERSIONS = {Family.IPV4: 4 << 28, Family.IPV6: 6 << 28}
_SINGLE = 128
_GOLDEN = 0x9E3779B1  # spreads consecutive addresses (Knuth's multiplicative hash)
_WHOLE = 0xFFFFFFFF
LONGEST = 4096
"""The longest program that the kernel accepts (BPF_MAXINSNS)."""

_INSTRUCTION = struct.Struct("=HBBI")


class Instruction(NamedTuple):
    """One instruction of classic BPF (struct sock_filter)."""

    code: int
    if_true: int
    if_false: int
    value: int


Program = list[Instruction]

PASS: Program = [Instruction(_RET_K, 0, 0, _WHOLE)]
DROP: Program = [Instruction(_RET_K, 0, 0, 0)]


def on_interface(index: int, body: Program) -> Program:
    """Run `body`, which returns, for packets that arrived on the device with this ifindex."""
    assert len(body) < 256
    load, compare = Instruction(_LD_W_ABS, 0, 0, _INTERFACE), Instruction(_JEQ_K, 0, len(body), index)
    return [load, compare, *body]


def from_network(network: Network, body: Program) -> Program:
    """Run `body`, which returns, for packets from a network. All packets must be of its family."""
    return _compared(_SOURCE, network, 0, len(body)) + body


def unless_from_network(network: Network, body: Program) -> Program:
    """Run `body`, which returns, for packets that are not from a network."""
    return _compared(_SOURCE, network, len(body), 0) + body


def only_to(address: Address) -> Program:
    """Pass the packets to one address, and drop those of the other family, too."""
    network = Network(address, _SINGLE)
    rest = [*_compared(_DESTINATION, network, 0, len(PASS)), *PASS, *DROP]
    version = Instruction(_JEQ_K, 0, len(rest) - len(DROP), _VERSIONS[network_family(network)])
    return [
        Instruction(_LD_W_ABS, 0, 0, _NETWORK_HEADER),
        Instruction(_AND_K, 0, 0, _VERSION_MASK),
        version,
        *rest,
    ]


def _compared(
    ends: Mapping[Family, tuple[int, int]], network: Network, if_equal: int, otherwise: int
) -> Program:
    """Compare the address at one of `ends`; then skip that many instructions."""
    offset, words = ends[network_family(network)]
    length = network.length - (V4_BITS if words == 1 else 0)
    raw = network.address[-4 * words :]
    program: Program = []
    comparisons = []
    for word in range((length + 31) // 32):
        mask = _WHOLE << max(0, 32 * (word + 1) - length) & _WHOLE
        value = int.from_bytes(raw[4 * word : 4 * word + 4]) & mask
        program += [
            Instruction(_LD_W_ABS, 0, 0, _NETWORK_HEADER + offset + 4 * word),
            Instruction(_AND_K, 0, 0, mask),
            Instruction(_JEQ_K, 0, 0, value),
        ]
        comparisons.append(len(program) - 1)
    if not comparisons:  # a network of all addresses
        return [Instruction(_JA, 0, 0, if_equal)]
    for at in comparisons:
        program[at] = program[at]._replace(if_false=len(program) - at - 1 + otherwise)
    program[-1] = program[-1]._replace(if_true=if_equal)
    return program


def from_networks(networks: Iterable[Network], body: Program) -> Program:
    """Run `body`, which returns, for packets from any of the networks."""
    return [each for network in networks for each in from_network(network, body)]


def by_source(family: Family, members: int) -> Program:
    """Choose the socket of a group by the source address: its number, from 0 to `members` - 1."""
    offset, words = _SOURCE[family]
    program = [Instruction(_LD_W_ABS, 0, 0, _NETWORK_HEADER + offset)]
    for word in range(1, words):
        program += [
            Instruction(_TAX, 0, 0, 0),
            Instruction(_LD_W_ABS, 0, 0, _NETWORK_HEADER + offset + 4 * word),
            Instruction(_XOR_X, 0, 0, 0),
        ]
    return [
        *program,
        Instruction(_MUL_K, 0, 0, _GOLDEN),
        Instruction(_RSH_K, 0, 0, 16),
        Instruction(_MOD_K, 0, 0, members),
        Instruction(_RET_A, 0, 0, 0),
    ]


def attach(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """Filter the packets that arrive at a socket; replaces its filter. Raises Rejected."""
    _set(sock, _SO_ATTACH_FILTER, program, "cannot attach a filter to a socket")


def detach(sock: socket.socket) -> None:
    """Remove the filter of a socket, if it has one."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    except FileNotFoundError:
        return


def attach_choice(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """Choose the socket of the group (SO_REUSEPORT) of a bound socket with a program. Raises Rejected."""
    _set(sock, _SO_ATTACH_REUSEPORT_CBPF, program, "cannot attach a program to a group of sockets")


def _set(sock: socket.socket, option: int, program: Sequence[Instruction], action: str) -> None:
    code = b"".join(_INSTRUCTION.pack(*each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, described)
    except OSError as failure:
        raise Rejected(f"{action}: {failure.strerror}") from failure
