"""The filter program and the two structs of sock_diag, without a kernel."""

import errno
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.errors import EbpfProxyError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.model.address import Address, Protocol, parse_address

addresses = st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "::10.0.0.1"]).map(parse_address)
peers = st.tuples(addresses, st.sampled_from([53, 80, 65535]))


def accepts(program: bytes, peer: tuple[Address, int]) -> bool:
    """The result of inet_diag_bc_run() for an IPv6 socket of that peer, with the checks of
    inet_diag_bc_audit()."""
    offset = 0
    while offset < len(program):
        code, yes, no = struct.unpack_from("=BBH", program, offset)
        assert yes >= 4
        assert no >= 4
        assert yes % 4 == no % 4 == 0
        assert offset + yes <= len(program) and offset + no <= len(program) + 4  # noqa: PT018
        if code == 8:
            family, bits, port = struct.unpack_from("=BBxxi", program, offset + 4)
            size = 4 if family == socket.AF_INET else 16
            address = program[offset + 12 : offset + 12 + size]
            assert bits == size * 8
            prefix = bytes(10) + b"\xff\xff" if size == 4 else b""
            matches = port == peer[1] and prefix + address == peer[0]
        else:
            assert code == 1
            matches = False
        offset += yes if matches else no
    return offset == len(program)


@given(st.sets(peers, min_size=1), peers)
def test_the_filter_accepts_exactly_its_destinations(
    wanted: set[tuple[Address, int]], peer: tuple[Address, int]
) -> None:
    assert accepts(sockets.bytecode(wanted), peer) is (peer in wanted)


def test_without_destinations_nothing_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "dump", None)  # a call would be a TypeError
    assert list(sockets.connected_udp(set())) == []


def rejecting(code: int) -> object:
    def reject(*_: object) -> None:
        raise OSError(code, "refused")

    return reject


SOCKET = sockets.DiagSocket(
    socket.AF_INET, Protocol.UDP, parse_address("10.0.0.9"), 4711, parse_address("10.0.0.1"), 53, 1, 0
)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOENT, NotFound),
        (errno.EOPNOTSUPP, Unsupported),
        (errno.EPERM, Unsupported),
        (errno.EINVAL, Rejected),
    ],
)
def test_a_rejected_destroy_becomes_our_error(
    code: int, error: type[EbpfProxyError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlink, "change", rejecting(code))
    with pytest.raises(error, match=r"10\.0\.0\.1:53"):
        sockets.destroy(SOCKET)


def test_a_kernel_without_udp_diag_is_unsupported_and_not_an_empty_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netlink, "dump", rejecting(errno.ENOENT))
    with pytest.raises(Unsupported) as caught:
        sockets.connected_udp()
    assert "udp_diag" in caught.value.hint
