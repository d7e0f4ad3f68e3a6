"""External clients with --ebpf-xdp: packets of established flows are forwarded before the stack, over veth.

On a veth pair, an XDP program only sends frames if the other end has GRO, or an XDP program. It forwards only
packets with complete checksums, as from a wire.
"""

import contextlib
import os
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.lab import Lab, PodNetwork, sockets
from ebpfproxy.lab.devices import set_offload, set_offloads
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP
from tests.kernel.cluster import eventually
from tests.kernel.two_nodes import TwoNodes, streamed

pytestmark = pytest.mark.kernel

families = pytest.mark.parametrize("family", ["v4", "v6"])
protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
MODES = pytest.mark.parametrize("mode", ["native", "generic"])
STREAM = os.urandom(1 << 20)
_XDP, _ATTACH = 6, 37
_PASS = bytes.fromhex("b7000000020000009500000000000000")  # r0 = XDP_PASS; exit


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoNodes]:
    """Both agents have the option. The client's and the endpoints' packets have complete checksums."""
    with Lab("test-xdp", 69, PodNetwork.ROUTED) as lab, TwoNodes(lab) as made:
        for namespace, device in made.every_device():
            set_offloads(namespace, device, False)
            set_offload(namespace, device, "gro", True)
        made.start("--ebpf-redirect", "--ebpf-xdp=native")
        made.await_second()
        yield made


def _forwarded(pair: TwoNodes) -> int:
    with contextlib.closing(View(pair.lab.bpffs)) as view:
        return next(row.value for row in view.counters() if row.counter == "xdp_forwarded")


def _xdp_mode(pair: TwoNodes) -> str:
    with contextlib.closing(View(pair.lab.bpffs)) as view:
        return {row.device: row.xdp for row in pair.node.call(lambda: list(view.devices()))}["eth0"]


def _restarted(pair: TwoNodes, mode: str) -> None:
    if _xdp_mode(pair) != mode:
        pair.restart("--ebpf-redirect", f"--ebpf-xdp={mode}")
        eventually(lambda: _xdp_mode(pair) == mode, f"XDP in mode {mode}")


@families
@protocols
@MODES
def test_packets_of_an_open_connection_are_forwarded_by_xdp(
    pair: TwoNodes, mode: str, family: str, protocol: Protocol
) -> None:
    _restarted(pair, mode)
    web = pair.everywhere().to(pair.d)
    address, port = web.frontend("NodePort", family, protocol)
    with netns.entered(pair.x.netns):
        client = sockets.dial(protocol, address, port, sockets.ANSWERED)
    with client:
        talk = sockets.exchange if protocol is TCP else sockets.exchange_datagram
        assert talk(client, b"first") == b"first"
        before = _forwarded(pair)

        def answered() -> bool:
            """Many exchanges: the first packet of each second is passed to tc."""
            for _ in range(100):
                assert talk(client, b"again") == b"again"
            return _forwarded(pair) - before >= 200

        eventually(answered, "200 packets forwarded by XDP")
    assert not pair.bad_checksums()


@families
@MODES
def test_a_stream_is_echoed_completely(pair: TwoNodes, mode: str, family: str) -> None:
    _restarted(pair, mode)
    web = pair.everywhere().to(pair.d)
    before = _forwarded(pair)
    assert streamed(pair.x, *web.frontend("NodePort", family, TCP), STREAM) == STREAM
    assert _forwarded(pair) > before
    assert not pair.bad_checksums()
