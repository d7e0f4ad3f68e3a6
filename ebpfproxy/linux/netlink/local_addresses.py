"""The kernel's local table: what this node would deliver to itself.

A NodePort answers on every local address, and these are not Node.status.addresses but whatever the
routes of type LOCAL say: addresses of all devices, 127.0.0.0/8, prefixes made local by hand (`ip route add
local`, AnyIP). Broadcast, multicast and anycast routes are in the same table and are none of it. Nor are
those of kube-ipvs0, which are addresses of Services: no NodePort answers on them, in other modes neither
while they are still there (GetAllLocalAddressesExcept() of kube-proxy).

Everything here acts in the network namespace that the calling thread is in. Read with raw netlink,
not with pyroute2: see `netlink` for why.
"""

import socket
import threading
from collections.abc import Callable, Iterable

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import dummy, netlink, rtnetlink, rtnetlink_watch
from ebpfproxy.model.address import V4_BITS, V4_PREFIX, Address, Network


def read() -> frozenset[Network]:
    """The networks of both families that are local, mostly single addresses.

    127.0.0.0/8 and ::1/128 are among them once loopback is up; before, and without other devices, the
    set is empty. IPv4 addresses of a device that is down are local, its IPv6 addresses are not.

    Raises Rejected.
    """
    services = dummy.index(dummy.KUBE_IPVS0)  # first: a device that comes later is in the next reading
    try:
        routes = rtnetlink.routes(rtnetlink.RT_TABLE_LOCAL, rtnetlink.RTN_LOCAL)
    except OSError as error:
        raise Rejected(f"the local routes cannot be read: {error.strerror or error}") from error
    return frozenset(local_networks(routes, services))


def local_networks(routes: Iterable[bytes], except_by: int = 0) -> set[Network]:
    """Destinations of the routes (struct rtmsg and attributes) that are of type local, in the local table.

    Those by the device of index `except_by` are left out; an address that another one has, too, is not.
    """
    found: set[Network] = set()
    for route in routes:
        family, length, _, _, table, _, _, kind, _ = rtnetlink.ROUTE.unpack_from(route)
        if table != rtnetlink.RT_TABLE_LOCAL or kind != rtnetlink.RTN_LOCAL:
            continue
        attributes = dict(netlink.attributes(route, rtnetlink.ROUTE.size))
        if except_by and netlink.number(attributes.get(rtnetlink.RTA_OIF)) == except_by:
            continue
        value = attributes.get(rtnetlink.RTA_DST, b"")
        if family == socket.AF_INET:
            found.add(Network(Address(V4_PREFIX + value.ljust(4, b"\0")), V4_BITS + length))
        elif family == socket.AF_INET6:
            found.add(Network(Address(value.ljust(16, b"\0")), length))
    return found


def watch(changed: Callable[[frozenset[Network]], object], stop: threading.Event) -> None:
    """Report the local networks to `changed` at once, and again whenever they differ, until `stop` is set.

    Runs in the calling thread and calls `changed` in it: see `rtnetlink_watch`.

    Raises Rejected where the first read, or the subscription, fails.
    """
    rtnetlink_watch.watch("the local routes", read, _is_relevant, changed, stop)


def _is_relevant(report: bytes) -> bool:
    """False for a route of another table: a router's come and go by the thousand.

    Links concern us because a device that is put into a VRF takes its IPv4 routes out of this table
    without a word about them (fib_disable_ip()).
    """
    route = rtnetlink.reported_route(report)
    return route is None or route.table == rtnetlink.RT_TABLE_LOCAL
