"""Decides whether the frames that leave a node can result from the frames that entered it.

Like packet_judge.py it records translations, but for the complete path through the node: ingress, stack and
egress. Frames that are not allowed raise AssertionError.
"""

import struct
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, family, unspecified
from tests.support import headers
from tests.support.device_path import Received
from tests.support.headers import Headers, Tuple
from tests.support.packet_judge import FrontendKey, Offer

_SYN, _RST, _ACK = 2, 4, 16
_RECENT = 256
"""Number of packets that may still be in transit: more than a batch, because packets may be redirected."""


class Sent(NamedTuple):
    """A packet that entered, and the part of it that no translation changes."""

    raw: bytes
    parts: headers.Parts
    rest: bytes


class WireJudge:
    """`judged` counts leaving packets. `missing` has packets whose translation has not left yet."""

    def __init__(
        self,
        offers: Mapping[FrontendKey, Offer],
        node: frozenset[Address],
        devices: Mapping[str, frozenset[Address]],
    ) -> None:
        """`node`: the addresses of NodePorts; `devices`: by name, the addresses used to masquerade there."""
        self._offers = offers
        self._node = node
        self._devices = devices
        self._own = node.union(*devices.values(), (address for address, _, _ in offers))
        self.judged: Counter[str] = Counter()
        self.forget()

    def forget(self) -> None:
        """Forget all flows and all packets in transit."""
        self._known: dict[Tuple, set[Tuple]] = defaultdict(set)
        self._pairs: dict[tuple[Address, Address], set[tuple[Address, Address]]] = defaultdict(set)
        self._recent: deque[Sent] = deque(maxlen=_RECENT)
        self._originals: set[Tuple] = set()
        self._unread: deque[bytes] = deque(maxlen=_RECENT)
        self.missing: Counter[bytes] = Counter()

    def sent(self, raw: bytes) -> None:
        """Record a packet that enters the node."""
        self.judged["in"] += 1
        if not headers.read(raw):
            self._unread.append(raw)
            return
        raw, parts = _trimmed(raw)
        if self._offer(parts.outer.tuple):
            self._originals.add(parts.outer.tuple)
        self._recent.append(Sent(raw, parts, _rest(raw, parts)))
        if self._is_due(raw, parts.outer):
            self.missing[_rest(raw, parts)] += 1

    def _is_due(self, raw: bytes, packet: Headers) -> bool:
        """Whether a translation of the packet must leave: it is complete, and has an endpoint."""
        offer = self._offer(packet.tuple)
        return (
            offer is not None
            and bool(offer.endpoints)
            and not offer.drops
            and _opens(raw, packet)
            and packet.protocol in _SIZES
            and _is_usual(raw, packet)
            and headers.is_good(raw)
        )

    def _offer(self, original: Tuple) -> Offer | None:
        address, port = original.destination, original.destination_port
        found = self._offers.get((address, port, original.protocol))
        if found is None and address in self._node:
            found = self._offers.get((unspecified(family(address)), port, original.protocol))
        return found

    def out(self, got: Received) -> None:
        """Judge a packet that left the node."""
        self.judged["out"] += 1
        if not headers.read(got.raw):
            self.judged["out, no packet"] += 1
            return
        raw, parts = _trimmed(got.raw)
        got = got._replace(raw=raw)
        self._is_not_left_out(got.raw, parts.outer)
        rest = _rest(got.raw, parts)
        candidates = [sent for sent in self._recent if sent.rest == rest]
        # All candidates are recorded: they differ only in addresses and ports.
        if not [sent for sent in candidates if self._may_become(sent, got, parts)]:
            self._answer(got.raw, parts.outer, [str(sent.parts.outer.tuple) for sent in candidates])
            return
        if self.missing[rest]:
            self.missing[rest] -= 1
        if not self.missing[rest]:
            del self.missing[rest]

    def _is_not_left_out(self, raw: bytes, packet: Headers) -> None:
        """No packet that opens a flow leaves untranslated, and the stack answers none."""
        offer = self._offer(packet.tuple)
        left = offer and _opens(raw, packet) and packet.protocol in _SIZES
        assert not left, f"{packet.tuple} left untranslated"
        self._is_no_answer_of_the_stack(raw, packet)

    def _is_no_answer_of_the_stack(self, raw: bytes, packet: Headers) -> None:
        """For the stack, an untranslated NodePort would be a closed port."""
        quoted = headers.quoted(raw, packet)
        if packet.protocol == headers.TCP and packet.has_ports and _is_reset_by_stack(raw, packet):
            original = packet.tuple.reversed()
        elif quoted and tuple(raw[packet.l4 : packet.l4 + 2]) in _UNREACHABLE:
            original = quoted.tuple
        else:
            return
        offer = self._offer(original)
        if packet.tuple.source in self._own and offer and offer.endpoints:
            assert not self._opened(original), f"{original} was rejected: {self._sent_as(original)}"

    def _opened(self, original: Tuple) -> bool:
        """Whether all packets that entered with this tuple open a flow. The stack gives the same answer to
        others, for example a FIN without ACK, or a packet with more extension headers than the programs
        parse."""
        ports = struct.pack("!HH", original.source_port, original.destination_port)
        like = [sent for sent in self._recent if sent.parts.outer.tuple == original]
        return (
            bool(like)
            and all(_opens(sent.raw, sent.parts.outer) for sent in like)
            and not any(ports in raw for raw in self._unread)
        )

    def _sent_as(self, original: Tuple) -> list[str]:
        return [sent.raw.hex() for sent in self._recent if sent.parts.outer.tuple == original]

    def _answer(self, raw: bytes, packet: Headers, like: list[str]) -> None:
        """A packet that was not sent must be an answer of the node, or of the programs for a frontend.
        `like`: tuples of packets that entered and differ only in addresses and ports."""
        is_reset = packet.protocol == headers.TCP and packet.has_ports and bool(raw[packet.l4 + 13] & _RST)
        is_icmp = packet.protocol in (headers.ICMP, headers.ICMPV6)
        has_options = packet.version == 4 and packet.l4 - packet.l3 > 20  # the stack may change options
        known = (is_reset or is_icmp) and (packet.tuple.source in self._own or packet.version == 6)
        known = known or self._is_abort_of_a_frontend(raw, packet)
        assert known or has_options, f"{packet.tuple} was not sent, but {like}"
        self.judged["answers"] += 1

    def _is_abort_of_a_frontend(self, raw: bytes, packet: Headers) -> bool:
        """The answer to the INIT of a client, if the Service has no endpoints."""
        offer = self._offer(packet.tuple.reversed())
        return (
            packet.protocol == headers.SCTP
            and offer is not None
            and offer.rejects
            and raw[packet.l4 + 12 :] == _ABORT
            and packet.tuple.reversed() in self._originals
        )

    def _may_become(self, sent: Sent, got: Received, parts: headers.Parts) -> bool:
        before, after = sent.parts.outer, parts.outer
        if headers.defects(sent.raw, sent.parts) != headers.defects(got.raw, parts):
            return False
        if sent.parts.inner and parts.inner:
            return self._error(sent.parts, parts)
        if before.tuple == after.tuple:
            self.judged["left as they came"] += 1
            return True
        if before.fragment == "later":
            return self._later(before.tuple, after.tuple, got.device)
        if after.tuple in self._known.get(before.tuple, ()):
            self.judged["translated again"] += 1
            return True
        return self._opens_flow(before.tuple, after.tuple, got.device) or self._replies(
            before.tuple, after.tuple
        )

    def _replies(self, is_: Tuple, becomes: Tuple) -> bool:
        """A reply of a flow whose forwarded packets were truncated, and therefore not parsed."""
        offer = self._offer(becomes.reversed())
        if not offer or becomes.reversed() not in self._originals:
            return False
        masquerades = frozenset().union(*self._devices.values())
        return (is_.source, is_.source_port) in offer.endpoints and (
            is_.destination == becomes.destination or is_.destination in masquerades
        )

    def _later(self, is_: Tuple, becomes: Tuple, device: str) -> bool:
        """A later fragment is translated like the first one, which the stack may have dropped."""
        if (becomes.source, becomes.destination) in self._pairs[is_.source, is_.destination]:
            return True
        frontends = {is_.destination}
        if is_.destination in self._node:
            frontends.add(unspecified(family(is_.destination)))
        of_frontend = (offer for (address, *_), offer in self._offers.items() if address in frontends)
        endpoints = {address for offer in of_frontend for address, _ in offer.endpoints}
        return becomes.destination in endpoints and becomes.source in self._devices[device] | {is_.source}

    def _opens_flow(self, original: Tuple, becomes: Tuple, device: str) -> bool:
        offer = self._offer(original)
        if not offer or (becomes.destination, becomes.destination_port) not in offer.endpoints:
            return False
        if becomes.source != original.source and becomes.source not in self._devices[device]:
            return False
        for tuple_, other in ((original, becomes), (becomes.reversed(), original.reversed())):
            self._known[tuple_].add(other)
            self._pairs[tuple_.source, tuple_.destination].add((other.source, other.destination))
        self.judged["flows opened"] += 1
        return True

    def _error(self, before: headers.Parts, after: headers.Parts) -> bool:
        assert before.inner
        assert after.inner
        is_, becomes = before.inner.tuple, after.inner.tuple
        if is_ == becomes:
            return True
        self.judged["ICMP errors translated"] += 1
        return becomes in self._known.get(is_, ()) or becomes.reversed() in self._known.get(
            is_.reversed(), ()
        )


_SIZES = {headers.TCP: 20, headers.UDP: 8}
"""Header sizes of the protocols whose ports may be translated."""
_UNREACHABLE = {(3, 3), (1, 4)}
"""Type and code of port unreachable, ICMP and ICMPv6."""
_ABORT = b"\x06\0\0\x04"
"""An ABORT chunk without a cause (RFC 9260, 3.3.7)."""


def _opens(raw: bytes, packet: Headers) -> bool:
    if packet.fragment == "later" or not packet.has_ports:
        return False
    if packet.protocol == headers.TCP:
        return raw[packet.l4 + 13] & (_SYN | _RST | _ACK) == _SYN
    return True


def _is_reset_by_stack(raw: bytes, packet: Headers) -> bool:
    """RST and ACK with sequence number and window 0, as for a SYN to a closed port (tcp_v4_send_reset())."""
    flags, seq, window = raw[packet.l4 + 13], raw[packet.l4 + 4 :][:4], raw[packet.l4 + 14 :][:2]
    return flags == _RST | _ACK and not any(seq + window)


def _is_usual(raw: bytes, packet: Headers) -> bool:
    """The stack has no reason to drop it: this node's MAC, no options, no fragment, TTL above 1."""
    if raw[:6] != bytes.fromhex("020000000001") or packet.fragment:
        return False
    if not packet.l4 + _SIZES[packet.protocol] <= packet.end <= len(raw):
        return False
    if packet.version == 4:
        clients = packet.tuple.source[12:14] == bytes((198, 51))
        return clients and packet.l4 - packet.l3 == 20 and raw[packet.l3 + 8] > 1
    clients = packet.tuple.source[:4] == bytes.fromhex("20010db8")
    return clients and packet.l4 - packet.l3 == 40 and raw[packet.l3 + 7] > 1


def _trimmed(raw: bytes) -> tuple[bytes, headers.Parts]:
    """The frame without the data after the end of the packet, which the stack removes and ICMP errors do not
    quote. A length that contradicts the headers removes nothing."""
    complete = raw[: headers.parts(raw).outer.end]
    raw = complete if headers.read(complete) else raw
    return raw, headers.parts(raw)


def _rest(raw: bytes, parts: headers.Parts) -> bytes:
    """The frame without the parts that a translation or a router changes, and without its padding."""
    kept = bytearray(headers.without_translated_fields(raw, parts))
    del kept[max(parts.outer.end, parts.outer.l4) :]
    kept[: parts.outer.l3] = bytes(parts.outer.l3)
    kept[parts.outer.l3 + (8 if parts.outer.version == 4 else 7)] = 0
    return bytes(kept)
