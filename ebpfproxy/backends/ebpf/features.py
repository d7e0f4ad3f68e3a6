"""Optional kernel features, each found by loading a program that uses it, or by running one.

The kernel's version is not used, since distributions backport single features. Helpers have the numbers of
include/uapi/linux/bpf.h. Each probe passes valid arguments, so the verifier can reject it only because the
feature is missing.

The result is not compiled into the programs. The loader writes 0 or 1 for each feature (`HAVE` in
bpf/compat.h), so one object file serves all kernels.
"""

import contextlib
import errno
from collections.abc import Collection
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.hooks import CONNECT4, SCHED_CLS, XDP, XDP_ATTACH_TYPE
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.test_run import TestRuns
from ebpfproxy.linux.bpf.xdp import Mode

_FRAME = 10  # the register that points to the end of the stack
_TUPLE, _FIB = 16, 64  # bytes: struct bpf_sock_tuple with IPv4, padded, and struct bpf_fib_lookup
_SOCK = 64  # the offset of `sk` in struct bpf_sock_addr
_SK_RELEASE, _MAP_UPDATE_ELEM = 86, 2
_HAS_FRAGS = 1 << 5
_PSEUDO_MAP_FD = 1  # in place of a register: the immediate is a map's file descriptor


def _instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    """struct bpf_insn."""
    numbers = offset.to_bytes(2, "little", signed=True) + immediate.to_bytes(4, "little", signed=True)
    return bytes((code, source << 4 | to)) + numbers


def _set(register: int, value: int) -> bytes:
    return _instruction(0xB7, register, immediate=value)


def _copy(register: int, source: int) -> bytes:
    return _instruction(0xBF, register, source)


def _call(helper: int) -> bytes:
    return _instruction(0x85, immediate=helper)


_EXIT = _instruction(0x95)
RETURN_0 = _set(0, 0) + _EXIT
RETURN_1 = _set(0, 1) + _EXIT
RETURN_2 = _set(0, 2) + _EXIT
GET_NETNS_COOKIE = _call(122)


def _stack(register: int, size: int) -> bytes:
    """Set the register to the address of `size` zero bytes on the stack. `size` is a multiple of 8."""
    zeros = b"".join(_instruction(0x7A, _FRAME, offset=-at) for at in range(8, size + 1, 8))
    return zeros + _copy(register, _FRAME) + _instruction(0x07, register, immediate=-size)


def _lookup(helper: int) -> bytes:
    """bpf_skc_lookup_tcp(ctx, tuple, size, netns, flags), or a similar helper. A found socket is released."""
    arguments = _stack(2, _TUPLE) + _set(3, 12) + _set(4, -1) + _set(5, 0)
    release = _copy(1, 0) + _call(_SK_RELEASE)
    none_found = _instruction(0x15, 0, offset=len(release) // 8)  # if r0 == 0 skip the release
    return arguments + _call(helper) + none_found + release + RETURN_0


def stores_netns_cookie(array_fd: int) -> bytes:
    """A program for connect4 that writes bpf_get_netns_cookie(ctx) to entry 0 of a BPF_MAP_TYPE_ARRAY."""
    cookie = GET_NETNS_COOKIE + _instruction(0x7B, _FRAME, 0, offset=-8)
    key = _instruction(0x7A, _FRAME, offset=-16)
    array = _instruction(0x18, 1, _PSEUDO_MAP_FD, immediate=array_fd) + _instruction(0)
    pointers = b"".join(
        _copy(register, _FRAME) + _instruction(0x07, register, immediate=offset)
        for register, offset in ((2, -16), (3, -8))
    )
    return cookie + key + array + pointers + _set(4, 0) + _call(_MAP_UPDATE_ELEM) + RETURN_1


class Probe(NamedTuple):
    """A probe of a feature. `name`: that of its placeholder in bpf/abi.h, without PLACEHOLDER_."""

    name: str
    code: bytes


REDIRECT_NEIGH = Probe(  # 5.10, b4ab31414970: an ifindex, no next hop, no flags
    "HAVE_REDIRECT_NEIGH", _set(1, 1) + _set(2, 0) + _set(3, 0) + _set(4, 0) + _call(152) + RETURN_0
)
PROBES = (
    Probe("HAVE_SK_LOOKUP_UDP", _lookup(85)),  # 4.20, 6acc9b432e67
    Probe(  # 4.18, 87f5fc7e48dd
        "HAVE_FIB_LOOKUP", _stack(2, _FIB) + _set(3, _FIB) + _set(4, 0) + _call(69) + RETURN_0
    ),
    Probe("HAVE_SKC_LOOKUP_TCP", _lookup(99)),  # 5.2, edbf8c01de5a
    REDIRECT_NEIGH,
    Probe("HAVE_REDIRECT_PEER", _set(1, 1) + _set(2, 0) + _call(155) + RETURN_0),  # 5.10, 9aa1206e8f48
    Probe("HAVE_KTIME_COARSE", _call(160) + RETURN_0),  # 5.11, d05512618056
    Probe("HAVE_NETNS_COOKIE", GET_NETNS_COOKIE + RETURN_0),  # 6.15, eb62f49de7ec
)
SET_RETVAL = Probe("HAVE_SET_RETVAL", _set(1, -111) + _call(187) + RETURN_1)  # 5.18, b44123b4a3dc

SKC_TO_MPTCP_SOCK = Probe(  # 5.19, 3bc253c2e652: with bpf_sock_addr.sk, if it is not NULL
    "HAVE_SKC_TO_MPTCP_SOCK",
    _instruction(0x79, 1, 1, offset=_SOCK) + _instruction(0x15, 1, offset=1) + _call(196) + RETURN_1,
)
CONNECT_PROBES = (SET_RETVAL, SKC_TO_MPTCP_SOCK)

_FIB_LOOKUP_SRC_FLAG = 1 << 4
FIB_LOOKUP_SRC = Probe(  # 6.7, dab4e1f06cab: the verifier does not know the flags of the helper
    "HAVE_FIB_LOOKUP_SRC",
    _stack(2, _FIB) + _set(3, _FIB) + _set(4, _FIB_LOOKUP_SRC_FLAG) + _call(69) + _EXIT,
)
_FRAME_BYTES = 64  # a test run requires an Ethernet header


def require_fib_lookup_src() -> None:
    """Run the probe FIB_LOOKUP_SRC. The helper checks its flags first, then the family, which is none.

    Raises Rejected, with EINVAL as the cause if the kernel does not know the flag.
    """
    program = bpf.Program.load(SCHED_CLS, 0, FIB_LOOKUP_SRC.code)
    with contextlib.closing(program):
        result, _ = TestRuns(program).run(bytes(_FRAME_BYTES))
    if result != -errno.EAFNOSUPPORT:
        raise Rejected("bpf_fib_lookup() rejects BPF_FIB_LOOKUP_SRC") from OSError(errno.EINVAL, "")


def present() -> frozenset[str]:
    """The names of the features that the kernel has.

    Raises Rejected if loading programs is not permitted.
    """
    found = [probe for probe in PROBES if bpf.loads(SCHED_CLS, 0, probe.code)]
    kind = CONNECT4.program_type, CONNECT4.attach_type
    found += [probe for probe in CONNECT_PROBES if bpf.loads(*kind, probe.code)]
    with contextlib.suppress(Rejected):
        require_fib_lookup_src()
        found.append(FIB_LOOKUP_SRC)
    return frozenset(probe.name for probe in found)


def xdp_flags(mode: Mode) -> int:
    """The BPF_F_* with which the XDP program is loaded.

    With BPF_F_XDP_HAS_FRAGS (5.18, c2f2cdbeffda) drivers also accept it with an MTU for which frames need
    several buffers. In generic mode it is not needed. There the kernel copies a frame into several buffers
    even if one is enough, and with Linux 6.18 tc programs did not recognize these packets.
    """
    has_frags = mode is Mode.NATIVE and bpf.loads(XDP, XDP_ATTACH_TYPE, RETURN_2, _HAS_FRAGS)
    return _HAS_FRAGS if has_frags else 0


def numbers(features: Collection[str]) -> dict[int, int]:
    """What the loader writes into the programs for a kernel with these features (`Relocation.numbers`)."""
    names = (probe.name for probe in (*PROBES, *CONNECT_PROBES, FIB_LOOKUP_SRC))
    return {abi.CONSTANTS[f"PLACEHOLDER_{name}"]: int(name in features) for name in names}
