"""Messages and attributes, encoded and decoded without a kernel."""

import errno
import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netlink.netlink import Request


def test_messages_of_odd_lengths_in_one_datagram_are_all_found() -> None:
    first = netlink.message(20, netlink.NLM_F_REQUEST, 1, b"abcde")
    datagram = first + bytes(3) + netlink.message(21, 0, 2, b"")
    assert list(netlink.messages(datagram)) == [
        netlink.Message(20, netlink.NLM_F_REQUEST, 1, b"abcde"),
        netlink.Message(21, 0, 2, b""),
    ]


def test_a_truncated_message_is_skipped() -> None:
    whole = netlink.message(20, 0, 1, b"abcd")
    assert [one.sequence for one in netlink.messages(whole + netlink.message(20, 0, 2, b"abcd")[:-1])] == [1]


@given(st.lists(st.tuples(st.integers(0, 0x3FFF), st.binary(max_size=40))))
def test_attributes_are_decoded_as_they_were_encoded(pairs: list[tuple[int, bytes]]) -> None:
    payload = b"head" + b"".join(netlink.attribute(kind, value) for kind, value in pairs)
    assert list(netlink.attributes(payload, 4)) == pairs


@given(st.binary(max_size=200))
def test_decoding_junk_ends_and_raises_nothing(junk: bytes) -> None:
    list(netlink.messages(junk))
    list(netlink.attributes(junk, 0))


class Answers:
    """Replaces `recvmsg`: datagrams in order, with their senders."""

    def __init__(self, *datagrams: tuple[bytes, int]) -> None:
        self._datagrams = list(datagrams)

    def recvmsg(self, size: int) -> tuple[bytes, list[object], int, tuple[int, int]]:
        data, sender = self._datagrams.pop(0)
        return data[:size], [], socket.MSG_TRUNC if len(data) > size else 0, (sender, 0)


def done(code: int = 0, flags: int = 0) -> bytes:
    return netlink.message(netlink.NLMSG_DONE, flags, 1, struct.pack("=i", code))


def whole(*datagrams: tuple[bytes, int]) -> list[bytes] | None:
    return netlink._complete_dump(Answers(*datagrams))  # type: ignore[arg-type]


def test_a_dump_in_several_datagrams_is_read_to_its_end() -> None:
    parts = [(netlink.message(20, 2, 1, b"%04d" % number), 0) for number in range(3)]
    assert whole(*parts, (done(), 0)) == [b"0000", b"0001", b"0002"]


def test_replies_to_other_requests_and_from_other_processes_are_ignored() -> None:
    ours, foreign = netlink.message(20, 2, 1, b"ours"), netlink.message(20, 2, 7, b"else")
    assert whole((ours + foreign, 0), (netlink.message(20, 2, 1, b"liar"), 4711), (done(), 0)) == [b"ours"]


def test_an_inconsistent_dump_has_no_result() -> None:
    assert whole((netlink.message(20, netlink.NLM_F_DUMP_INTR, 1, b"half"), 0), (done(), 0)) is None
    assert whole((netlink.message(20, 2, 1, b"half"), 0), (done(flags=netlink.NLM_F_DUMP_INTR), 0)) is None


@pytest.mark.parametrize("kind", [netlink.NLMSG_DONE, netlink.NLMSG_ERROR])
def test_an_error_at_the_end_of_a_dump_is_raised(kind: int) -> None:
    with pytest.raises(OSError) as caught:
        whole((netlink.message(kind, 0, 1, struct.pack("=i", -errno.EACCES)), 0))
    assert caught.value.errno == errno.EACCES


def test_a_dump_that_is_always_interrupted_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def disturbed(sock: socket.socket) -> None:
        attempts.append(sock)
        if len(attempts) % 2:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    monkeypatch.setattr(netlink, "_complete_dump", disturbed)
    with pytest.raises(OSError) as caught:
        netlink.dump(socket.NETLINK_ROUTE, 26, bytes(12))
    assert caught.value.errno == errno.EAGAIN
    assert len(attempts) == netlink.DUMP_ATTEMPTS


@given(st.lists(st.integers(0, 70_000), max_size=200))
def test_requests_are_sent_in_order_and_the_last_of_each_datagram_requests_a_reply(sizes: list[int]) -> None:
    requests = [Request(20, netlink.NLM_F_CREATE, bytes(4 * (size // 4))) for size in sizes]
    sent: list[int] = []
    for datagram, last in netlink._datagrams(requests):
        found = list(netlink.messages(datagram))
        assert [each.flags for each in found[:-1]] == [netlink.NLM_F_REQUEST | netlink.NLM_F_CREATE] * (
            len(found) - 1
        )
        assert found[-1].flags == netlink.NLM_F_REQUEST | netlink.NLM_F_CREATE | netlink.NLM_F_ACK
        assert found[-1].sequence == last
        assert len(found) <= 64
        assert len(found) == 1 or len(datagram) <= 1 << 16
        sent += [each.sequence for each in found]
    assert sent == list(range(len(requests)))


def test_a_rejection_has_the_kernels_text_or_that_of_the_errno() -> None:
    header = bytes(16)
    reason = netlink.attribute(1, b"no such thing\0")
    capped = 0x100  # NLM_F_CAPPED
    answer = netlink.Message(
        netlink.NLMSG_ERROR, capped, 7, struct.pack("=i", -errno.EPERM) + header + reason
    )
    assert netlink._rejection(answer) == (errno.EPERM, "no such thing")
    plain = netlink.Message(
        netlink.NLMSG_ERROR, 0, 7, struct.pack("=i", -errno.EPERM) + header + b"the request"
    )
    assert netlink._rejection(plain) == (errno.EPERM, os.strerror(errno.EPERM))
    well = netlink.Message(netlink.NLMSG_ERROR, capped, 7, bytes(4) + header)
    assert netlink._rejection(well) is None
