"""Changes of virtual servers, ipsets, addresses, sysctls and rules of mode ipvs."""

from collections.abc import Callable

from ebpfproxy.backends.ipvs.sets import NAMES
from ebpfproxy.linux import ipset, sysctl
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.messages import RealServer, ServerKey
from ebpfproxy.linux.netlink import dummy
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.model.address import format_address, format_endpoint, parse_address
from tests.kernel.verify import in_iptables
from tests.kernel.verify.node import Node


def _server(node: Node, with_reals: bool = False) -> ServerKey:
    found = ipvs.read()
    return node.random.choice(sorted(key for key, listed in found.items() if listed.reals or not with_reals))


def _text(key: ServerKey) -> str:
    return str(key.port)


def delete_server(node: Node) -> str:
    key = _server(node)
    assert not ipvs.apply([ipvs.delete_server(key)])
    return _text(key)


def change_server(node: Node) -> str:
    key = _server(node)
    server = ipvs.read()[key].server
    changed = server._replace(scheduler="rr" if server.scheduler != "rr" else "wrr")
    assert not ipvs.apply([ipvs.change_server(changed)])
    return _text(key)


def add_server(node: Node) -> str:
    """A virtual server with an address of a Service, and another port."""
    server = ipvs.read()[_server(node)].server
    key = server.key._replace(port=node.random.randrange(1024, 65536))
    assert not ipvs.apply([ipvs.add_server(server._replace(key=key))])
    return format_endpoint(key.address, key.port)


def delete_real(node: Node) -> str:
    key = _server(node, with_reals=True)
    real = node.random.choice(sorted(ipvs.read()[key].reals))
    assert not ipvs.apply([ipvs.delete_real(key, real.address, real.port)])
    return _text(key)


def add_real(node: Node) -> str:
    key = _server(node, with_reals=True)
    real = next(iter(ipvs.read()[key].reals))
    assert not ipvs.apply([ipvs.add_real(key, real._replace(port=real.port ^ 1))])
    return _text(key)


def change_real(node: Node) -> str:
    key = _server(node, with_reals=True)
    real: RealServer = node.random.choice(sorted(ipvs.read()[key].reals))
    assert not ipvs.apply([ipvs.change_real(key, real._replace(weight=real.weight + 1))])
    return _text(key)


def delete_member(node: Node) -> str:
    sets = ipset.read(NAMES)
    name, text = node.random.choice(sorted((name, text) for name in sets for text in sets[name].members))
    assert not ipset.change([f"del {name} {text}"])
    return text.partition(",")[0]


def delete_address(node: Node) -> str:
    address = node.random.choice(sorted(dummy.addresses(KUBE_IPVS0)))
    dummy.change_addresses(KUBE_IPVS0, (), [address])
    return format_address(address)


def add_address(node: Node) -> str:
    dummy.change_addresses(KUBE_IPVS0, [parse_address("192.0.2.8")], ())
    return "192.0.2.8"


def change_sysctl(node: Node) -> str:
    name = "net/ipv4/vs/expire_nodest_conn"
    sysctl.ensure(name, "0")
    return name


STAY: tuple[Callable[[Node], str], ...] = (
    *(delete_server, change_server, add_server, delete_real, add_real, change_real, delete_member),
    *(delete_address, add_address, change_sysctl, in_iptables.delete_jump, in_iptables.add_jump),
)
PASSING = ()
