"""Decides whether a classifier's action on a packet was allowed, based only on the packets.

It records the translations and does not read the map of flows. From the records it knows to which client a
reply or an ICMP error may be sent. Actions that are not allowed raise AssertionError.
"""

import dataclasses
import ipaddress
from collections import Counter, defaultdict
from collections.abc import Mapping

from ebpfproxy.model.address import Address, Family, family, unspecified
from tests.support import headers
from tests.support.headers import Headers, Tuple
from tests.support.packet_path import REDIRECT, SHOT, UNSPEC

EndpointAddress = tuple[Address, int]
FrontendKey = tuple[Address, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The allowed actions at a frontend: forward to `endpoints`; reject; drop."""

    endpoints: frozenset[EndpointAddress]
    rejects: bool = False
    drops: bool = False


class Judge:
    """`judged` counts the packets by action."""

    def __init__(
        self,
        offers: Mapping[FrontendKey, Offer],
        node_ports_at: frozenset[Address],
        devices: Mapping[str, frozenset[Address]],
    ) -> None:
        """A NodePort has the unspecified address. `devices`: by name, the addresses used to masquerade
        there."""
        self._offers = offers
        self._node_ports_at = node_ports_at
        self._devices = devices
        self._pingable = {address for address, _, _ in offers} - {
            unspecified(family(a)) for a, _, _ in offers
        }
        self.judged: Counter[str] = Counter()
        self.forget()

    def forget(self) -> None:
        """Forget all flows."""
        self._known: dict[tuple[str, Tuple], set[Tuple]] = defaultdict(set)
        self._pairs: dict[tuple[str, Address, Address], set[tuple[Address, Address]]] = defaultdict(set)
        self._forwarded: set[Tuple] = set()  # forwarded to an endpoint at ingress
        self._of_fragments: dict[Tuple, frozenset[EndpointAddress]] = {}  # the client's new port is unknown

    def offer(self, original: Tuple) -> Offer | None:
        address, _, port = original.destination, original.source_port, original.destination_port
        found = self._offers.get((address, port, original.protocol))
        if found is None and address in self._node_ports_at:
            found = self._offers.get((unspecified(family(address)), port, original.protocol))
        return found

    # At ingress

    def ingress(self, frame: bytes, verdict: int, out: bytes) -> None:
        """Judge a `frame` that was changed or got a verdict."""
        before = headers.read(frame)
        assert before, "a packet that cannot be parsed was changed"
        if before.protocol in (headers.ICMP, headers.ICMPV6):
            self._icmp("ingress", frame, before, verdict, out)
        elif verdict == SHOT and _is_sctp_fragment(before):
            self._dropped_fragment(before)
        elif before.fragment == "later":
            self._later("ingress", frame, before, verdict, out)
        else:
            self._transport_in(frame, before, verdict, out)

    def _transport_in(self, frame: bytes, before: Headers, verdict: int, out: bytes) -> None:
        offer = self.offer(before.tuple)
        if verdict == REDIRECT:
            assert offer, "an answer from an address that is no frontend"
            assert offer.rejects, "a rejection although there is an endpoint"
            self._rejection(frame, before, out)
        elif verdict == SHOT:
            assert offer, "a packet for no Service was dropped"
            unanswered = (
                _is_too_long_to_quote(before)
                or _gets_no_answer(before.tuple.source)
                or not _is_init(frame, before)
            )
            excused = offer.drops or (offer.rejects and unanswered)
            assert excused, "a packet for a Service with endpoints was dropped"
            self.judged["dropped"] += 1
        else:
            assert verdict == UNSPEC, verdict
            self._translated_in(frame, before, offer, out)

    def _translated_in(self, frame: bytes, before: Headers, offer: Offer | None, out: bytes) -> None:
        is_, becomes = before.tuple, self._unharmed(frame, out)
        if becomes in self._known.get(("ingress", is_), ()):
            self.judged["translated at ingress"] += 1
            return
        assert offer, f"{is_} became {becomes}, but is for no Service"
        assert (becomes.destination, becomes.destination_port) in offer.endpoints, becomes
        assert becomes.source == is_.source
        self._learn("ingress", is_, becomes)
        self._learn("egress", becomes.reversed(), is_.reversed())
        self._forwarded.add(becomes)
        self.judged["opened"] += 1

    def _dropped_fragment(self, before: Headers) -> None:
        """It may have opened a flow, for only the translation of its ports failed."""
        self.judged["dropped"] += 1
        offer = self.offer(before.tuple)
        if offer:
            self._of_fragments[before.tuple] = offer.endpoints

    def _is_known(self, side: str, is_: Tuple, becomes: Tuple) -> bool:
        if becomes in self._known.get((side, is_), ()):
            return True
        opening, forwarded = (is_, becomes) if side == "ingress" else (becomes.reversed(), is_.reversed())
        endpoint = forwarded.destination, forwarded.destination_port
        return forwarded.source == opening.source and endpoint in self._of_fragments.get(opening, ())

    def _learn(self, side: str, is_: Tuple, becomes: Tuple) -> None:
        self._known[side, is_].add(becomes)
        pair = becomes.source, becomes.destination
        self._pairs[side, is_.source, is_.destination].add(pair)

    # At egress

    def egress(self, frame: bytes, device: str, verdict: int, out: bytes) -> None:
        """Judge a `frame` that was changed or got a verdict. It was forwarded, not host-originated."""
        before = headers.read(frame)
        assert before, "a packet that cannot be parsed was changed"
        if before.protocol in (headers.ICMP, headers.ICMPV6):
            self._icmp("egress", frame, before, verdict, out)
            return
        if verdict == SHOT and _is_sctp_fragment(before):
            self._dropped_fragment(before)
            return
        assert verdict in (UNSPEC, REDIRECT), f"verdict {verdict} at egress"
        if before.fragment == "later":
            self._later("egress", frame, before, verdict, out)
            return
        is_, becomes = before.tuple, self._unharmed(frame, out)
        is_reply = is_ not in self._forwarded
        assert verdict == UNSPEC or is_reply, "a packet to an endpoint was redirected at egress"
        if self._is_known("egress", is_, becomes):
            self.judged["replies by the request's device"] += verdict == REDIRECT
        elif is_ in self._forwarded:
            assert becomes.source in self._devices[device], f"{is_} was masqueraded as {becomes} at {device}"
            assert becomes[1::2] == is_[1::2], "masquerade changed the destination"
            self._learn_masqueraded(is_, becomes)
        else:
            raise AssertionError(f"{is_} became {becomes}")
        self.judged["translated at egress"] += 1

    def _learn_masqueraded(self, is_: Tuple, becomes: Tuple) -> None:
        self._learn("egress", is_, becomes)
        self._learn("ingress", becomes.reversed(), is_.reversed())

    # Both

    def _unharmed(self, frame: bytes, out: bytes) -> Tuple:
        """The resulting tuple. Only addresses, ports and checksums may have changed."""
        before, after = headers.parts(frame), headers.parts(out)
        assert len(out) == len(frame), "a packet's length changed"
        assert headers.defects(frame, before) == headers.defects(out, after), "a checksum became wrong"
        rest = headers.without_translated_fields
        assert rest(frame, before) == rest(out, after), "something else changed"
        return after.outer.tuple

    def _later(self, side: str, frame: bytes, before: Headers, verdict: int, out: bytes) -> None:
        """A later fragment is translated like the first one."""
        becomes = self._unharmed(frame, out)
        is_reply = side == "egress" and becomes.destination == before.tuple.destination
        assert verdict == UNSPEC or (verdict == REDIRECT and is_reply)
        known = self._pairs.get((side, before.tuple.source, before.tuple.destination), ())
        assert (becomes.source, becomes.destination) in known, "a fragment of an unknown flow was changed"
        self.judged["later fragments"] += 1

    def _icmp(self, side: str, frame: bytes, before: Headers, verdict: int, out: bytes) -> None:
        if verdict == REDIRECT:
            self._pong(frame, before, out)
            return
        assert verdict == UNSPEC, f"an ICMP packet got the verdict {verdict}"
        inner = headers.quoted(frame, before)
        assert inner, "an ICMP packet without a quoted packet was changed"
        self._unharmed(frame, out)
        after = headers.quoted(out, before)
        assert after, "the packet quoted by an ICMP error became invalid"
        about, becomes = inner.tuple.reversed(), after.tuple.reversed()
        is_known = self._is_known(side, about, becomes) or self._is_known(side, inner.tuple, after.tuple)
        assert is_known, f"an error about {about} was changed into one about {becomes}"
        self.judged["ICMP errors"] += 1

    def _pong(self, frame: bytes, before: Headers, out: bytes) -> None:
        assert before.tuple.destination in self._pingable, "an echo reply from an address that is no frontend"
        after = headers.read(out)
        assert after
        assert out[before.l4 + 4 :] == frame[before.l4 + 4 :], "an echo reply with other data"
        assert out[before.l4] == {8: 0, 128: 129}[frame[before.l4]]
        _turned_round(frame, before, out, after)
        if headers.is_good(frame):
            assert headers.is_good(out), "an echo reply with a bad checksum"
        self.judged["pings answered"] += 1

    def _rejection(self, frame: bytes, before: Headers, out: bytes) -> None:
        after = headers.read(out)
        assert after
        _turned_round(frame, before, out, after)
        if before.protocol == headers.TCP:
            assert after.tuple == before.tuple.reversed()
            assert out[after.l4 + 13] == 0x14, "not RST and ACK"
            assert len(out) == len(frame)
            assert headers.is_good(out) or not headers.is_good(frame), "a reset with a bad checksum"
        elif before.protocol == headers.SCTP:
            assert after.tuple == before.tuple.reversed()
            assert out[after.l4 + 4 : after.l4 + 8] == frame[before.l4 + 16 : before.l4 + 20]
            assert out[after.l4 + 12 :] == b"\x06\0\0\x04", "not an ABORT"
            *_, defect = headers.defects(out, headers.Parts(after, None))
            assert not defect, "an ABORT with a bad CRC"
            assert headers.is_good(out) or not headers.is_good(frame), "an ABORT with a bad checksum"
        else:
            expected = (3, 3) if before.version == 4 else (1, 4)
            assert (out[after.l4], out[after.l4 + 1]) == expected, "no port unreachable"
            assert out[after.l4 + 8 :] == frame[before.l3 : before.l4 + 8], "the error quotes another packet"
            assert after.end == len(out)
            assert not any(headers.defects(out, headers.Parts(after, None))), "a bad checksum"
        self.judged["refused"] += 1


def _is_sctp_fragment(packet: Headers) -> bool:
    """The CRC cannot be changed without the length of the complete packet."""
    return packet.protocol == headers.SCTP and packet.fragment != ""


def _is_init(frame: bytes, packet: Headers) -> bool:
    """False only for a packet of SCTP without an INIT chunk, or with the tag 0."""
    at = packet.l4 + 12
    chunk = frame[at : at + 8]
    return packet.protocol != headers.SCTP or (len(chunk) == 8 and chunk[0] == 1 and any(chunk[4:]))


def _gets_no_answer(source: Address) -> bool:
    """Multicast and similar addresses, which get no answer."""
    where = ipaddress.ip_address(source[12:] if family(source) is Family.IPV4 else bytes(source))
    return (
        where.is_multicast or where.is_loopback or where.is_unspecified
        or (where.version == 4 and where.packed[0] >= 240)
    )  # fmt: skip


def _is_too_long_to_quote(packet: Headers) -> bool:
    """Longer than QUOTED_MAX of bpf/answer.h: the IP header, extension headers, and 8 bytes."""
    return packet.l4 - packet.l3 + 8 > 124


def _turned_round(frame: bytes, before: Headers, out: bytes, after: Headers) -> None:
    assert out[:12] == frame[6:12] + frame[:6], "Ethernet's addresses"
    assert out[12:14] == frame[12:14]
    assert (after.tuple.source, after.tuple.destination) == (before.tuple.destination, before.tuple.source)
    assert out[after.l3 + (8 if after.version == 4 else 7)] == 64, "an answer has the default TTL"
