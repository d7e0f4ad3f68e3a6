"""Live flows whose addresses and ports an attacker knows, and the packets that it sends in their names.

No such packet ends a flow, or gives it another endpoint. Nothing here knows of the maps: what counts is what
leaves, and whether both ends still reach each other.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

from ebpfproxy.model.address import Address, Protocol, parse_address
from tests.support import headers
from tests.support.conversations import ACK, FIN, PSH, RST, SYN, Conversation, End, Segment, ends, frame
from tests.support.packet_path import SHOT, UNSPEC, PacketPath
from tests.support.random_packets import error_about

FLOWS = 8
"""For each frontend."""

_FLAGS = (
    SYN, RST, RST | ACK, FIN | ACK, FIN, ACK, PSH | ACK, SYN | ACK, SYN | FIN, SYN | RST, 0, 0x3F
)  # fmt: skip
_FAR = 1 << 30
"""Sequence numbers at least so far from the next one are in no window, before or behind it."""
_NEAR = 30_000
"""Less than a window."""
_PAYLOADS = (b"", b"?", bytes(100))


class Victims:
    """`attack` and `check` raise AssertionError where something is not allowed. `seen` counts attacks."""

    def __init__(self, path: PacketPath, seed: int, frontends: Sequence[tuple[Protocol, End]]) -> None:
        self._path = path
        self._frontends = frontends
        self._random = random.Random(seed)
        self._ports = iter(range(1024, 60_000))
        self.flows: list[Conversation] = []
        self.seen: Counter[str] = Counter()

    def open(self) -> None:
        """Have new ones. Those that there were are no victims any more."""
        self.flows = [self._one(*each) for each in self._frontends for _ in range(FLOWS)]

    def _one(self, protocol: Protocol, frontend: End) -> Conversation:
        client = End(_client_of(frontend.address), next(self._ports))
        numbers = self._random.getrandbits(32), self._random.getrandbits(32)
        flow = Conversation(self._path, protocol, client, frontend, "", *numbers)
        assert flow.open(), "a victim cannot connect"
        assert flow.exchange()
        return flow

    def check(self) -> None:
        """Both ends of each flow still reach each other, and look the same."""
        for flow in self.flows:
            before = dataclasses.replace(flow)
            assert flow.exchange(), f"a victim's flow ended, or has another endpoint: {before}"

    def attack(self) -> None:
        """One packet in the name of an end of some flow."""
        flow = self._random.choice(self.flows)
        assert flow.endpoint
        assert flow.seen
        kind = self._random.random()
        if kind < 0.1:
            self._error(flow)
        elif kind < 0.7:
            self._spoof(flow, flow.client, flow.frontend, (flow.seen, flow.endpoint), flow.client_next)
        else:
            self._spoof(flow, flow.endpoint, flow.seen, (flow.frontend, flow.client), flow.endpoint_next)

    def _spoof(
        self, flow: Conversation, source: End, to: End, becomes: tuple[End, End], following: int
    ) -> None:
        """A packet whose sequence number is not `following`, nor near it unless it is a reset: RFC 5961, 3.2,
        has a reset in the window end nothing if its number is not the next one."""
        flags = self._random.choice(_FLAGS)
        distance = self._random.randrange(_FAR, 3 * _FAR)
        if flags & RST and not flags & SYN and self._random.random() < 0.2:
            distance = self._random.randrange(1, _NEAR)
        seq = (following + distance) % (1 << 32)
        segment = Segment(
            flags, seq, self._random.getrandbits(32) if flags & ACK else 0, self._random.choice(_PAYLOADS)
        )
        raw = frame(flow.protocol, source, to, segment)
        by_client = source == flow.client
        came_in, out = ("net", flow.towards) if by_client else (flow.towards, "net")
        left = self._path.forward(raw, came_in, out)
        what = f"flags {flags:#x}" if flow.protocol is Protocol.TCP else "datagram"
        self.seen[f"{what} of the {'client' if by_client else 'endpoint'}"] += 1
        if left.verdict == SHOT:
            return
        assert left.verdict == UNSPEC, f"verdict {left.verdict}: {raw.hex()}"
        assert ends(left.raw) == becomes, f"{ends(raw)} became {ends(left.raw)}, not {becomes}: {raw.hex()}"
        assert headers.is_good(left.raw), f"a checksum is wrong now: {raw.hex()}"

    def _error(self, flow: Conversation) -> None:
        """An ICMP error about a packet of the client, which a router claims to have dropped."""
        assert flow.endpoint
        assert flow.seen
        sent = frame(flow.protocol, flow.seen, flow.endpoint, Segment(ACK, self._random.getrandbits(32)))
        found = headers.read(sent)
        assert found
        self._path.forward(error_about(sent, found), flow.towards, "net")
        self.seen["ICMP error"] += 1


def _client_of(frontend: Address) -> Address:
    """Of the same family. Random packets come from other addresses."""
    v4 = frontend.startswith(bytes(10) + b"\xff\xff")
    return parse_address("198.51.102.9" if v4 else "2001:db8:9a::9")
