"""Entries and requests of ctnetlink, encoded and decoded without a kernel."""

import errno
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.errors import EbpfProxyError, KernelError, Rejected, Unsupported
from ebpfproxy.linux.netlink import conntrack, netlink
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, parse_address

PORTS = st.integers(0, 0xFFFF)
NUMBERS = st.integers(0, 0xFFFFFFFF)
V4_ADDRESSES = st.binary(min_size=4, max_size=4).map(lambda four: Address(V4_PREFIX + four))
V6_ADDRESSES = st.binary(min_size=15, max_size=15).map(lambda rest: Address(b"\xfd" + rest))


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    addresses = draw(st.sampled_from([V4_ADDRESSES, V6_ADDRESSES]))
    zone, reply_zone = draw(st.sampled_from([(0, 0), (7, 7), (7, 0), (0, 7), (7, 8)]))
    return Flow(
        draw(st.sampled_from(Protocol)),
        source=draw(addresses),
        source_port=draw(PORTS),
        destination=draw(addresses),
        destination_port=draw(PORTS),
        reply_source=draw(addresses),
        reply_source_port=draw(PORTS),
        reply_destination=draw(addresses),
        reply_destination_port=draw(PORTS),
        status=draw(NUMBERS),
        zone=zone,
        reply_zone=reply_zone,
        mark=draw(NUMBERS),
        id=draw(NUMBERS),
    )


def nested(kind: int, *attributes: bytes) -> bytes:
    return netlink.attribute(kind | conntrack.NESTED, b"".join(attributes))


def told(flow: Flow) -> bytes:
    """The kernel's payload for an entry: ctnetlink_fill_info()."""
    four = flow.source.startswith(V4_PREFIX)

    def direction(kind: int, ends: tuple[tuple[Address, int], tuple[Address, int]], zone: int) -> bytes:
        whole = conntrack.tuple_attribute(kind, flow.protocol, *ends)
        own = b"" if flow.zone == flow.reply_zone or not zone else zone_of(conntrack.CTA_TUPLE_ZONE, zone)
        return nested(kind, whole[4:], own)

    original = (flow.source, flow.source_port), (flow.destination, flow.destination_port)
    reply = (flow.reply_source, flow.reply_source_port), (flow.reply_destination, flow.reply_destination_port)
    return b"".join(
        [
            conntrack.HEAD.pack(socket.AF_INET if four else socket.AF_INET6, 0, 0),
            direction(conntrack.CTA_TUPLE_ORIG, original, flow.zone),
            direction(conntrack.CTA_TUPLE_REPLY, reply, flow.reply_zone),
            zone_of(conntrack.CTA_ZONE, flow.zone) if flow.zone == flow.reply_zone != 0 else b"",
            netlink.attribute(conntrack.CTA_STATUS, flow.status.to_bytes(4)),
            netlink.attribute(7, (30).to_bytes(4)),  # CTA_TIMEOUT
            netlink.attribute(conntrack.CTA_MARK, flow.mark.to_bytes(4)),
            netlink.attribute(conntrack.CTA_ID, flow.id.to_bytes(4)),
        ]
    )


def zone_of(kind: int, zone: int) -> bytes:
    return netlink.attribute(kind, zone.to_bytes(2))


def listing(monkeypatch: pytest.MonkeyPatch, *payloads: bytes) -> None:
    """Make every dump return these payloads."""
    monkeypatch.setattr(netlink, "dump", lambda *_: list(payloads))


@given(flows())
def test_an_entry_is_decoded_from_its_payload(flow: Flow) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        listing(monkeypatch, told(flow))
        assert list(conntrack.flows(flow.protocol, Family.IPV4)) == [flow]


FLOW = Flow(
    Protocol.UDP,
    parse_address("10.0.0.9"),
    4711,
    parse_address("10.96.0.10"),
    53,
    parse_address("10.1.0.1"),
    5353,
    parse_address("10.0.0.9"),
    4711,
    status=conntrack.IPS_DST_NAT,
    zone=0,
    reply_zone=0,
    mark=0,
    id=12,
)


def test_dnat_and_snat_are_read_from_the_status() -> None:
    assert (FLOW.is_dnated, FLOW.is_snated) == (True, False)
    other = FLOW._replace(status=conntrack.IPS_SRC_NAT)
    assert (other.is_dnated, other.is_snated) == (False, True)


def test_other_protocols_are_skipped_if_the_kernel_does_not_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ping = netlink.attribute(conntrack.CTA_PROTO_NUM, b"\x01")
    ends = [netlink.attribute(kind, bytes(4)) for kind in (1, 2)]
    parts = nested(1, *ends), nested(2, ping)
    icmp = conntrack.HEAD.pack(socket.AF_INET, 0, 0) + nested(1, *parts) + nested(2, *parts)
    listing(monkeypatch, told(FLOW._replace(protocol=Protocol.TCP)), icmp, told(FLOW))
    assert list(conntrack.flows(Protocol.UDP, Family.IPV4)) == [FLOW]


@given(st.binary(max_size=120))
def test_junk_is_no_entry_and_raises_nothing(junk: bytes) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        listing(monkeypatch, conntrack.HEAD.pack(socket.AF_INET6, 0, 0) + junk)
        list(conntrack.flows(Protocol.UDP))
        conntrack.nat_in_use()


@given(flows())
def test_a_deletion_always_contains_the_reply_tuple(flow: Flow) -> None:
    """A request without a tuple would delete all entries."""
    sent: list[bytes] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(netlink, "change", lambda protocol, kind, body: sent.append(body))
        assert conntrack.delete(flow) is True
    (body,) = sent
    found = dict(netlink.attributes(body, conntrack.HEAD.size))
    assert found[conntrack.CTA_ID] == flow.id.to_bytes(4)
    assert found[conntrack.CTA_ZONE] == flow.reply_zone.to_bytes(2)
    reply = (flow.reply_source, flow.reply_source_port), (flow.reply_destination, flow.reply_destination_port)
    named = conntrack.tuple_attribute(conntrack.CTA_TUPLE_REPLY, flow.protocol, *reply)
    assert found[conntrack.CTA_TUPLE_REPLY] == dict(netlink.attributes(named, 0))[conntrack.CTA_TUPLE_REPLY]


@pytest.mark.parametrize(
    ("status", "in_use"),
    [(0x0E, False), (0x0E | conntrack.IPS_SRC_NAT, True), (0x0E | conntrack.IPS_DST_NAT, True)],
)
def test_nat_is_in_use_if_any_entry_is_translated_even_if_the_kernel_does_not_filter(
    status: int, in_use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing(monkeypatch, told(FLOW._replace(status=0)), told(FLOW._replace(status=status)))
    assert conntrack.nat_in_use() is in_use
    listing(monkeypatch)
    assert conntrack.nat_in_use() is False


def rejecting(code: int) -> object:
    def reject(*_: object) -> None:
        raise OSError(code, "refused")

    return reject


@pytest.mark.parametrize(
    ("code", "error", "remedy"),
    [
        (errno.EPERM, Unsupported, "CAP_NET_ADMIN"),
        (errno.EINVAL, Unsupported, "nf_conntrack_netlink"),
        (errno.EPROTONOSUPPORT, Unsupported, "nf_conntrack_netlink"),
        (errno.ENOBUFS, Rejected, ""),
    ],
)
def test_a_kernel_that_cannot_list_entries_is_an_error_with_a_hint(
    code: int, error: type[EbpfProxyError], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlink, "dump", rejecting(code))
    for ask in (lambda: list(conntrack.flows(Protocol.UDP)), conntrack.nat_in_use):
        with pytest.raises(error, match="cannot list conntrack entries: refused") as caught:
            ask()
        assert isinstance(caught.value, KernelError)
        assert remedy in caught.value.hint


def test_deleting_a_missing_entry_returns_false_and_a_busy_entry_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netlink, "change", rejecting(errno.ENOENT))
    assert conntrack.delete(FLOW) is False
    monkeypatch.setattr(netlink, "change", rejecting(errno.EBUSY))
    with pytest.raises(
        Rejected, match=r"cannot delete the conntrack entry 10\.0\.0\.9:4711 -> 10\.96\.0\.10:53/UDP: refused"
    ):
        conntrack.delete(FLOW)
