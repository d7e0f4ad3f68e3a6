"""Live flows whose addresses and ports an attacker knows, and the spoofed packets that it sends.

No such packet may end a flow or change its endpoint. The check is independent of the maps: it uses the
packets that leave, and whether both ends still reach each other.
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
"""The number of flows for each frontend."""

_FLAGS = (
    SYN, RST, RST | ACK, FIN | ACK, FIN, ACK, PSH | ACK, SYN | ACK, SYN | FIN, SYN | RST, 0, 0x3F
)  # fmt: skip
_FAR = 1 << 30
"""Sequence numbers at least this far from the next one are outside of every window."""
_NEAR = 30_000
"""A distance less than a window."""
_PAYLOADS = (b"", b"?", bytes(100))


class Victims:
    """`attack` and `check` raise AssertionError for disallowed results. `seen` counts attacks."""

    def __init__(self, path: PacketPath, seed: int, frontends: Sequence[tuple[Protocol, End]]) -> None:
        self._path = path
        self._frontends = frontends
        self._random = random.Random(seed)
        self._ports = iter(range(1024, 60_000))
        self.flows: list[Conversation] = []
        self.seen: Counter[str] = Counter()

    def open(self) -> None:
        """Replace all flows by new ones."""
        self.flows = [self._one(*each) for each in self._frontends for _ in range(FLOWS)]

    def _one(self, protocol: Protocol, frontend: End) -> Conversation:
        client = End(_client_of(frontend.address), next(self._ports))
        numbers = self._random.getrandbits(32), self._random.getrandbits(32)
        flow = Conversation(self._path, protocol, client, frontend, "", *numbers)
        assert flow.open(), "a victim cannot connect"
        assert flow.exchange()
        return flow

    def check(self) -> None:
        """Both ends of each flow still reach each other with unchanged addresses and ports."""
        for flow in self.flows:
            before = dataclasses.replace(flow)
            assert flow.exchange(), f"a victim's flow ended, or has another endpoint: {before}"

    def attack(self) -> None:
        """Send one packet with the addresses and ports of a flow."""
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
        """Send a packet whose sequence number is not `following`. Only resets may be near it: by RFC 5961,
        3.2, a
        reset in the window has no effect if its number is not the next one."""
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
        assert headers.is_good(left.raw), f"a checksum became wrong: {raw.hex()}"

    def _error(self, flow: Conversation) -> None:
        """Send an ICMP error in which a router claims to have dropped a packet of the client."""
        assert flow.endpoint
        assert flow.seen
        sent = frame(flow.protocol, flow.seen, flow.endpoint, Segment(ACK, self._random.getrandbits(32)))
        found = headers.read(sent)
        assert found
        self._path.forward(error_about(sent, found), flow.towards, "net")
        self.seen["ICMP error"] += 1


def _client_of(frontend: Address) -> Address:
    """A client address of the same family that random packets do not use."""
    v4 = frontend.startswith(bytes(10) + b"\xff\xff")
    return parse_address("198.51.102.9" if v4 else "2001:db8:9a::9")
