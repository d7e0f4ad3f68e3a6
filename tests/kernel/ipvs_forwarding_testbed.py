"""Two nodes in mode ipvs whose Services use direct routing and tunnels, and a client outside.

The pods a and b are on the first node, d and e on the second one. Packets of the client to addresses of
Services go to the first node. Servers answer with their name and the address of the client that they see; for
UDP from the address that the request was sent to.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from scapy.layers import inet

from ebpfproxy.lab import Agent, Lab, Node, Pod, manifests, sockets
from ebpfproxy.lab.devices import ip
from ebpfproxy.lab.netns import Call
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.cluster import START_PATIENCE, eventually

TCP, UDP = Protocol.TCP, Protocol.UDP
PORTS = {TCP: 8080, UDP: 5353}
SERVICES = ("203.0.113.0/24", "2001:db8:113::/64")
FAMILIES = ("v4", "v6")
OWN_POD = {"kind": "Pod", "namespace": "default"}
DIRECT, TUNNEL = "direct-routing", "tunnel"


HONORED = "--ipvs-service-forwarding"


class Forwarded:
    """Both nodes with their agents. Services are changed by changing files."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folder / "manifests"
        self.folder.mkdir()
        self.first, self.second = lab.nodes
        self.a, self.b, self.p = (self.first.pod(name) for name in "abp")
        self.d, self.e = (self.second.pod(name) for name in "de")
        self.x, self.node = lab.outside, self.first.host
        for pod in (self.a, self.b, self.d, self.e):
            serve(pod)
        for network in SERVICES:
            ip(lab.router, f"route add {network} via {self.node.v6 if ':' in network else self.node.v4}")
        # Replies do not come from where the route to their source leads.
        with netns.entered(lab.router.netns):
            for name in ("all", "default"):
                sysctl.ensure(f"net/ipv4/conf/{name}/rp_filter", "2")
        self.agents: list[Agent] = []
        self.before: dict[str, dict[str, str]] = {}
        """The sysctls before the agents started, by pod."""

    def start(self, *flags: str, node: Node | None = None) -> Agent:
        """Start the agent of a node, by default the first one, and wait for its first sync."""
        agent = (node or self.first).agent(
            self.folder, "--proxy-mode=ipvs", "--sync-period=2s", HONORED, *flags, wait=START_PATIENCE
        )
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
        self.agents.clear()

    def serve(
        self,
        number: int,
        forwarding: str,
        *pods: Pod,
        ports: Sequence[Protocol] = (TCP, UDP),
        target: int = 0,
        annotations: dict[str, str] | None = None,
        **spec: Any,
    ) -> str:
        """Write a Service with external IPs and these endpoints; return its name. `target`: another port."""
        name = f"web-{number}"
        entries = [manifests.port(PORTS[each], name=each.name.lower(), protocol=each.name) for each in ports]
        service = manifests.service(
            name, [f"10.96.0.{number}", f"fd00:10:96::{number:x}"], entries, externalIPs=vips(number), **spec
        )
        wanted = {"ebpfproxy/ipvs-forwarding": forwarding} if forwarding else {}
        service["metadata"]["annotations"] = wanted | (annotations or {})
        targets = [entry | {"port": target or entry["port"]} for entry in entries]
        slices = [
            manifests.endpoint_slice(
                f"{name}-{family}",
                name,
                [
                    manifests.endpoint(getattr(pod, family), node=node.name) | {"targetRef": OWN_POD}
                    for pod in pods
                    for node in self.lab.nodes
                    if pod is node.host or pod in node.pods.values()
                ],
                targets,
                family={"v4": "IPv4", "v6": "IPv6"}[family],
            )
            for family in FAMILIES
        ]
        manifests.write(self.folder / f"{name}.yaml", service, *slices)
        return name

    def remove(self, number: int) -> None:
        (self.folder / f"web-{number}.yaml").unlink(missing_ok=True)

    def answers(
        self, client: Pod, protocol: Protocol, number: int, family: str, count: int = 6, timeout: float = 10
    ) -> set[tuple[str, str]]:
        """The server's name and the client's address that it saw, of `count` connections."""
        vip = vips(number)[family == "v6"]
        texts = (client.ask(protocol, vip, PORTS[protocol], timeout) for _ in range(count))
        return {(name, seen) for name, _, seen in (text.partition(" ") for text in texts)}


def vips(number: int) -> list[str]:
    """The external IPs of the Service with this number."""
    return [f"203.0.113.{number}", f"2001:db8:113::{number:x}"]


def serve(pod: Pod) -> None:
    pod.serve_echo(TCP, PORTS[TCP])
    pod.start_until_ready(lambda ready: _serve_datagrams(pod.name, ready))


def _serve_datagrams(name: str, ready: int) -> None:
    """Answer datagrams of both families from the address that they were sent to."""
    with sockets.listening(UDP, PORTS[UDP]) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        os.write(ready, b"!")
        os.close(ready)
        while True:
            _, ancillary, _, peer = listener.recvmsg(1 << 16, 1024)
            ((level, kind, info),) = ancillary
            reply = [(level, kind, info[:16] + struct.pack("=i", 0))]
            listener.sendmsg([f"{name} {peer[0].removeprefix('::ffff:')}".encode()], reply, 0, peer)


def listed(node: Pod) -> str:
    """The output of ipvsadm on a node."""
    return node.run(["ipvsadm", "-Ln"]).stdout


def methods(node: Pod, number: int, family: str) -> set[str]:
    """How the TCP virtual server of a Service forwards, as ipvsadm shows it. Empty without real servers."""
    vip = vips(number)[family == "v6"]
    head = f"TCP  [{vip}]:8080 " if ":" in vip else f"TCP  {vip}:8080 "
    found: set[str] = set()
    for block in listed(node).split("\nTCP")[1:]:
        lines = f"TCP{block}".splitlines()
        if lines[0].startswith(head):
            found |= {line.split()[2] for line in lines[1:] if line.startswith("  ->")}
    return found


def devices(pod: Pod) -> dict[str, list[str]]:
    """The agent's devices in a network namespace, each with its addresses."""
    text = pod.run(["ip", "-j", "addr"]).stdout
    return {
        entry["ifname"]: sorted(each["local"] for each in entry["addr_info"] if each["scope"] != "link")
        for entry in json.loads(text)
        if entry["ifname"].startswith("ebp")
    }


def connections(pod: Pod) -> str:
    """The TCP sockets of a network namespace and their timers, to explain a failure."""
    return pod.run(["ss", "-t", "-a", "-n", "-o"]).stdout


def forwarded(pod: Pod) -> int:
    """The number of IPv4 packets that a network namespace has forwarded."""
    lines = pod.run(["cat", "/proc/net/snmp"]).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("Ip:"))
    return int(dict(zip(names, values, strict=True))["ForwDatagrams"])


def received(pod: Pod, device: str) -> int:
    """The number of packets that a device has received."""
    (shown,) = json.loads(pod.run(["ip", "-j", "-s", "link", "show", device]).stdout)
    return int(shown["stats64"]["rx"]["packets"])


def send_tunneled(source: str, destination: str, endpoint: str, count: int) -> None:
    """Send empty UDP datagrams in IPv4 tunnel packets to an endpoint, as IPVS does."""
    inner = bytes(inet.IP(src=source, dst=destination) / inet.UDP(sport=1024, dport=PORTS[UDP]))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_IPIP) as sender:
        for _ in range(count):
            sender.sendto(inner, (endpoint, 0))


def settings(pod: Pod) -> dict[str, str]:
    """The IPv4 sysctls of a network namespace that the agent may change, of all devices but its own."""

    def read() -> dict[str, str]:
        names = ("accept_local", "rp_filter", "arp_ignore", "arp_announce")
        root = sysctl.ROOT / "net/ipv4/conf"
        return {
            f"{device.name}/{name}": (device / name).read_text().strip()
            for device in sorted(root.iterdir())
            if not device.name.startswith(("ebp", "kube-", "tunl", "ip6tnl"))
            for name in names
        }

    return pod.call(read)


@contextlib.contextmanager
def load(client: Pod, *targets: tuple[Protocol, str]) -> Iterator[None]:
    """Within the block, the client connects to all targets, in turns. No connection may fail, and those of
    TCP that are open at the beginning of the block must last.
    """
    stop, stopped = os.pipe()

    def connect(ready: int) -> int:
        os.set_blocking(stop, False)
        done = 0
        with contextlib.ExitStack() as stack:
            lasting = [
                stack.enter_context(sockets.dial(protocol, vip, PORTS[protocol]))
                for protocol, vip in targets
                if protocol is TCP
            ]
            for each in lasting:
                sockets.exchange(each, b"first")
            os.write(ready, b"!")
            os.close(ready)
            while True:
                try:
                    if os.read(stop, 1):
                        break
                except BlockingIOError:
                    pass
                for protocol, vip in targets:
                    assert sockets.ask(protocol, vip, PORTS[protocol])
                    done += 1
            for each in lasting:
                assert sockets.exchange(each, b"last") == b"last"
        return done

    running: Call[int] = client.start_until_ready(connect)
    try:
        yield
    except BaseException:
        running.kill()
        raise
    finally:
        os.write(stopped, b"!")
        os.close(stopped)
        os.close(stop)
    assert running.result(timeout=300) > len(targets)


def settled(found: Any, expected: Any, what: str, patience: float = 60.0) -> None:
    """Wait until the function `found` returns the expected value."""
    eventually(lambda: found() == expected, what, patience)
