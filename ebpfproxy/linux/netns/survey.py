"""The facts about the network namespaces of this machine that may be those of pods.

Sources: rtnetlink(7), cgroups(7); net/core/fib_rules.c for the rules of policy routing; pkg/kubelet/cm of
Kubernetes for the names of cgroups (cgroup_manager_linux.go, pod_container_manager_linux.go).
"""

import contextlib
import errno
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import KernelError
from ebpfproxy.linux import processes
from ebpfproxy.linux.netlink import links, netlink, pod_devices, rtnetlink
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.xtables import legacy
from ebpfproxy.model.address import Family, family
from ebpfproxy.model.device import LOOPBACK, PAIRS, Device
from ebpfproxy.model.namespace import Link, Namespace

_UID = "[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"  # of a static pod: a digest
_POD = re.compile(rf"kubepods(?:[-./][^\n]*)?[-/]pod({_UID})(?:\.slice)?(?:/[^/\n]+(?:/container)?)?$", re.M)
"""The cgroup of a pod, or of one of its containers: with the cgroup driver systemd
kubepods-burstable-pod<UID>.slice/<container>, with cgroupfs kubepods/burstable/pod<UID>/<container>. crun may
add a cgroup named container. A cgroup below belongs to what a container has started."""

_RTM_GETRULE = 34
_FRA_PRIORITY = 6
_RULE = struct.Struct("=12x")  # struct fib_rule_hdr
_DEFAULT_RULES = frozenset({0, 32766, 32767})  # the tables local, main and default
_ORDINARY_ROUTES = frozenset({1, 2, 3, 4, 5})  # RTN_UNICAST, _LOCAL, _BROADCAST, _ANYCAST, _MULTICAST
_NOT_A_ROUTE = 0xFFFFFFFF  # the metric of IPv6's entry for "no route", which old kernels show
_NETLINK_NETFILTER, _NFT_MSG_GETTABLE = 12, 10 << 8 | 1
_NFGENMSG = bytes(4)
_MOST = 1000  # devices, routes, rules or tables of one kind that a pod may have and be known
_ABSENT = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)  # without the module nf_tables


class _Owner(NamedTuple):
    """The pod of a process. `by_node`: a process in the node's network namespace has started it."""

    pod: str
    by_node: bool


def survey(proc_root: Path, cookie: Callable[[], int]) -> tuple[Namespace, ...]:
    """The namespaces that are linked with the calling thread's, which is the node's, or that have processes
    of a pod, sorted by cookie.

    `cookie` returns the cookie of the calling thread's namespace. Leaves out namespaces that cannot be read.
    `in_flight` is set for all. Raises KernelError if the list of namespaces cannot be read.
    """
    with open("/proc/thread-self/ns/net", "rb") as node:
        own = namespaces.identity_of_descriptor(node.fileno())
        owners = _owners(proc_root, own)
        found = {}
        with contextlib.closing(namespaces.opened_network_namespaces(str(proc_root))) as descriptors:
            for descriptor in descriptors:
                identity = namespaces.identity_of_descriptor(descriptor)
                if identity == own:
                    continue
                with contextlib.suppress(KernelError, OSError):  # it ended, has too much, or is closed to us
                    with namespaces.in_namespace(descriptor), netlink.at_most(_MOST):
                        seen = read(node.fileno(), owners.get(identity), cookie)
                    if seen:
                        found[seen.cookie] = seen
    return tuple(found[each] for each in sorted(found))


def read(node: int, owner: _Owner | None, cookie: Callable[[], int]) -> Namespace | None:
    """The facts about the calling thread's namespace. None if it can be no pod's.

    `node`: a descriptor of the node's namespace. Raises KernelError or OSError.
    """
    found = links.all_links()
    link, is_linked, outer = _links(found, node)
    pod = owner.pod if owner and (owner.by_node or link is Link.NODE) else ""
    if not is_linked and not pod:
        return None
    devices = links.devices(found, rtnetlink.addresses())
    up = tuple(each for each in devices if each.up and each.link_type != LOOPBACK)
    addresses = frozenset(address for each in devices for address in each.addresses)
    families = {family(each) for device in up for each in device.addresses}
    return Namespace(
        cookie(),
        link,
        outer,
        addresses,
        pod,
        tuple(each.name for each in up),
        tuple(_special(families, up[0])) if len(up) == 1 else (),
    )


def _owners(proc_root: Path, node: namespaces.Identity) -> dict[namespaces.Identity, _Owner]:
    found: dict[namespaces.Identity, _Owner] = {}
    for folder in proc_root.glob("[0-9]*"):
        identity = namespaces.identity_of(f"{folder}/ns/net")
        if identity in (None, node) or (identity in found and found[identity].by_node):
            continue
        if pod := pod_of(folder):
            parent = processes.parent(folder)
            by_node = namespaces.identity_of(f"{proc_root}/{parent}/ns/net") == node
            if by_node or identity not in found:
                found[identity] = _Owner(pod, by_node)
    return found


def pod_of(process: Path) -> str:
    """The UID of the pod whose container the process is, by its cgroup. "" if there is none. `process` is its
    folder in proc."""
    try:
        match = _POD.search((process / "cgroup").read_text())
    except OSError:
        return ""
    return match[1].replace("_", "-") if match else ""


def _links(found: list[rtnetlink.Link], node: int) -> tuple[Link, bool, frozenset[int]]:
    """Where the devices lead, whether one of them leads to the node, and their peers there, by ifindex."""
    ids = pod_devices.ids_of(node)
    outer, seen = set(), set()
    for device in found:
        number = device.attributes.get(rtnetlink.IFLA_LINK_NETNSID)
        if number is None:
            continue
        seen.add(number in ids)
        if number in ids and device.kind in PAIRS:
            # A kernel before feadc4b6cf42 (5.13) omits IFLA_LINK if both are equal.
            outer.add(device.linked or device.ifindex)
    link = Link.ELSEWHERE if False in seen else Link.NODE if seen else Link.NONE
    return link, True in seen, frozenset(outer)


def _special(families: set[Family], device: Device) -> Iterator[str]:
    """Why packets to a frontend may take another way than those to an endpoint."""
    for ip_family in sorted(families, key=lambda each: each.value):
        if _has_rules(rtnetlink.NUMBERS[ip_family]):
            yield f"{ip_family.value} has policy routing"
        if reason := _unusual_routes(ip_family, device.ifindex):
            yield f"{ip_family.value} {reason}"
    for ip_family in Family:
        for table in sorted(legacy.tables(ip_family)):
            if legacy.has_rules(ip_family, table):
                yield f"{ip_family.value} has rules of iptables in table {table}"
    if _has_nft_tables():
        yield "it has tables of nftables"


def _has_rules(number: int) -> bool:
    request = struct.pack("=B11x", number)
    for rule in netlink.dump(socket.NETLINK_ROUTE, _RTM_GETRULE, request):
        attributes = dict(netlink.attributes(rule, _RULE.size))
        if netlink.number(attributes.get(_FRA_PRIORITY)) not in _DEFAULT_RULES:
            return True
    return False


def _unusual_routes(of: Family, device: int) -> str:
    """Why the main table does not send all packets to the device; "" if it does."""
    has_default = False
    for route in rtnetlink.routes(rtnetlink.RT_TABLE_MAIN, of=[of]):
        if route.metric == _NOT_A_ROUTE:
            continue
        if route.kind not in _ORDINARY_ROUTES:
            return "has a route that rejects packets"
        has_default = has_default or (not route.length and route.hop.ifindex == device)
    return "" if has_default else "has no default route"


def _has_nft_tables() -> bool:
    try:
        return bool(netlink.dump(_NETLINK_NETFILTER, _NFT_MSG_GETTABLE, _NFGENMSG))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
