"""The local addresses of this node, from routes of type local in the kernel's local table.

A NodePort is reachable on every local address. These are not Node.status.addresses. They are the addresses
of all devices, 127.0.0.0/8, and prefixes that were made local by hand (`ip route add local`, AnyIP).

Broadcast, multicast and anycast routes of the table do not count. Nor do routes of kube-ipvs0: its addresses
belong to Services, and NodePorts are not reachable on them. Other modes ignore them too, while the device
still exists (GetAllLocalAddressesExcept() of kube-proxy). The same holds for the routes of `local_routes`.

All functions act in the calling thread's network namespace. They use raw netlink instead of pyroute2 (see
`netlink`).
"""

import socket
import threading
from collections.abc import Callable, Iterable

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import dummy, netlink, rtnetlink, rtnetlink_watch
from ebpfproxy.linux.netlink.local_routes import PROTOCOL
from ebpfproxy.model.address import V4_BITS, V4_PREFIX, Address, Network


def read() -> frozenset[Network]:
    """The local networks of both families, mostly single addresses.

    They include 127.0.0.0/8 and ::1/128 once loopback is up. Without any address the set is empty. IPv4
    addresses of a device that is down are local, its IPv6 addresses are not.

    Raises Rejected.
    """
    # Before the routes: if the device is created later, the next read excludes it.
    kube_ipvs0 = dummy.index(dummy.KUBE_IPVS0)
    try:
        routes = rtnetlink.routes(rtnetlink.RT_TABLE_LOCAL, rtnetlink.RTN_LOCAL)
    except OSError as error:
        raise Rejected(f"cannot read the local routes: {error.strerror or error}") from error
    return frozenset(local_networks(routes, kube_ipvs0))


def local_networks(routes: Iterable[bytes], excluded_device: int = 0) -> set[Network]:
    """Destinations of the routes of type local in the local table. `routes`: struct rtmsg and attributes.

    Routes through the device with ifindex `excluded_device` and those of `local_routes` are skipped. An
    address that another device also has is in the result.
    """
    found: set[Network] = set()
    for route in routes:
        family, length, _, _, table, protocol, _, kind, _ = rtnetlink.ROUTE.unpack_from(route)
        if table != rtnetlink.RT_TABLE_LOCAL or kind != rtnetlink.RTN_LOCAL or protocol == PROTOCOL:
            continue
        attributes = dict(netlink.attributes(route, rtnetlink.ROUTE.size))
        if excluded_device and netlink.number(attributes.get(rtnetlink.RTA_OIF)) == excluded_device:
            continue
        value = attributes.get(rtnetlink.RTA_DST, b"")
        if family == socket.AF_INET:
            found.add(Network(Address(V4_PREFIX + value.ljust(4, b"\0")), V4_BITS + length))
        elif family == socket.AF_INET6:
            found.add(Network(Address(value.ljust(16, b"\0")), length))
    return found


def watch(changed: Callable[[frozenset[Network]], object], stop: threading.Event) -> None:
    """Report the local networks to `changed` at once, and again after each change, until `stop` is set.

    Runs in the calling thread and calls `changed` in it: see `rtnetlink_watch`.

    Raises Rejected if the first read or the subscription fails.
    """
    rtnetlink_watch.watch("the local routes", read, _is_relevant, changed, stop)


def _is_relevant(report: bytes) -> bool:
    """False for a route of another table, and for one of `local_routes`. A router, or this agent, changes
    thousands of them.

    Notifications about links are relevant. When a device joins a VRF, the kernel removes its IPv4 routes from
    this table and does not report these routes (fib_disable_ip()).
    """
    route = rtnetlink.reported_route(report)
    return route is None or (route.table == rtnetlink.RT_TABLE_LOCAL and route.protocol != PROTOCOL)
