"""The local addresses of this node, from routes of type local in the kernel's local table.

A NodePort is reachable on every local address. These are not Node.status.addresses. They are the addresses
of all devices, 127.0.0.0/8, and prefixes that were made local by hand (`ip route add local`, AnyIP).

Broadcast, multicast and anycast routes of the table do not count. Nor do routes of kube-ipvs0: its addresses
belong to Services, and NodePorts are not reachable on them. Other modes ignore them too, while the device
still exists (GetAllLocalAddressesExcept() of kube-proxy). The same holds for the routes of `local_routes`.

All functions act in the calling thread's network namespace.
"""

import threading
from collections.abc import Callable

from ebpfproxy.linux.netlink import dummy, rtnetlink, rtnetlink_watch
from ebpfproxy.linux.netlink.netlink import rejecting
from ebpfproxy.linux.netlink.rtnetlink import PROTOCOL, RT_TABLE_LOCAL, RTN_LOCAL
from ebpfproxy.model.address import Network

_OF_OTHERS = frozenset(range(256)) - {PROTOCOL}


def read() -> frozenset[Network]:
    """The local networks of both families, mostly single addresses.

    They include 127.0.0.0/8 and ::1/128 once loopback is up. Without any address the set is empty. IPv4
    addresses of a device that is down are local, its IPv6 addresses are not.

    Raises Rejected.
    """
    # Before the routes: if the device is created later, the next read excludes it.
    kube_ipvs0 = dummy.index(dummy.KUBE_IPVS0)
    with rejecting("cannot read the local routes"):
        found = rtnetlink.routes(RT_TABLE_LOCAL, RTN_LOCAL, _OF_OTHERS)
    return frozenset(route.network for route in found if not (kube_ipvs0 and route.hop.ifindex == kube_ipvs0))


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
    return route is None or (route.table == RT_TABLE_LOCAL and route.protocol != PROTOCOL)
