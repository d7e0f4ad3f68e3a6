"""External clients with --ebpf-xdp: packets of established flows are forwarded before the stack, over veth.

On a veth pair, an XDP program only sends frames if the other end has GRO, or an XDP program. It forwards only
packets with complete checksums, as from a wire.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf import cleanup, probes
from ebpfproxy.backends.ebpf.devices import xdp as xdp_devices
from ebpfproxy.backends.ebpf.inspect.inspection import EbpfInspection
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.lab import Lab, PodNetwork, sockets
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.linux.netlink import xdp as netlink_xdp
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP
from tests.kernel.cluster import eventually
from tests.kernel.others import xdp_linked
from tests.kernel.two_nodes import TwoNodes, streamed
from tests.support import datagrams
from tests.support.build import CONTEXT
from tests.support.offloads import set_offload, set_offloads

pytestmark = pytest.mark.kernel

families = pytest.mark.parametrize("family", ["v4", "v6"])
protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
MODES = pytest.mark.parametrize("mode", ["native", "generic"])
STREAM = os.urandom(1 << 20)


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoNodes]:
    """Both agents have the option. The client's and the endpoints' packets have complete checksums."""
    with Lab("test-xdp", 69, PodNetwork.ROUTED) as lab, TwoNodes(lab) as made:
        for namespace, device in made.every_device():
            set_offloads(namespace, device, False)
            set_offload(namespace.netns, device, "gro", True)
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
        talk = sockets.exchange if protocol is TCP else datagrams.exchange_datagram
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


@contextlib.contextmanager
def _other_program(pair: TwoNodes) -> Iterator[None]:
    """Within the block, the node's uplink has an XDP program of another owner."""
    with contextlib.ExitStack() as stack:
        with netns.entered(pair.node.netns):
            stack.enter_context(xdp_linked(socket.if_nametoindex("eth0"), "firewall"))
        yield


def _unexpected(pair: TwoNodes, mode: Mode | None) -> list[str]:
    """What `verify` reports about XDP for this mode."""
    settings = EbpfSettings(pair.lab.cgroup, pair.lab.bpffs, redirect=True, xdp=mode)
    inspection = EbpfInspection(settings, CONTEXT)

    def read() -> list[str]:
        inspection.read()
        return [str(each) for each in inspection.further() if "XDP" in str(each)]

    return pair.node.call(read)


def _findings(pair: TwoNodes) -> dict[str, str]:
    """The findings of `doctor` about XDP: what is missing, by feature."""
    found = pair.node.call(lambda: probes.probe(pair.lab.bpffs, pair.lab.cgroup, True, Mode.NATIVE))
    return {each.feature: each.missing for each in found if "XDP" in each.feature}


def test_a_device_with_another_xdp_program_works_with_tc_until_that_is_gone(pair: TwoNodes) -> None:
    pair.restart("--ebpf-redirect")
    eventually(lambda: _xdp_mode(pair) == "none", "no XDP program")
    web = pair.everywhere().to(pair.d)
    address, port = web.frontend("NodePort", "v4", TCP)
    with _other_program(pair):
        agent = pair.restart("--ebpf-redirect", "--ebpf-xdp=native")
        agent.await_line(lambda line: xdp_devices.UNAVAILABLE in line.text)
        assert streamed(pair.x, address, port, STREAM) == STREAM
        assert _xdp_mode(pair) == "none"
        assert ["firewall" in each for each in _unexpected(pair, Mode.NATIVE)] == [True]
        assert "firewall" in _findings(pair)["XDP at eth0"]
    eventually(lambda: _xdp_mode(pair) == "native", "the XDP program")
    assert _unexpected(pair, Mode.NATIVE) == []
    assert _findings(pair) == {"XDP links": ""}
    assert streamed(pair.x, address, port, STREAM) == STREAM


def test_without_the_option_the_program_is_removed(pair: TwoNodes) -> None:
    _restarted(pair, "native")
    assert _unexpected(pair, None)
    pair.restart("--ebpf-redirect")
    eventually(lambda: _xdp_mode(pair) == "none", "no XDP program")
    assert not any((pair.lab.bpffs / "xdp").iterdir())
    assert _unexpected(pair, None) == []


@pytest.mark.same_for("mode")
@MODES
def test_cleanup_removes_the_program(pair: TwoNodes, mode: str) -> None:
    _restarted(pair, mode)
    pair.end()

    def removed() -> tuple[list[str], dict[str, int]]:
        found = cleanup.remove(pair.lab.bpffs, pair.lab.cgroup)
        return found, netlink_xdp.devices()[socket.if_nametoindex("eth0")].programs

    found, programs = pair.node.call(removed)
    assert "XDP link of eth0" in found
    assert programs == {}
    pair.start("--ebpf-redirect", "--ebpf-xdp=native")
    pair.await_second()
