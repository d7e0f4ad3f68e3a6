"""Attaches programs to a device's ingress and egress as tc filters of clsact: bpf, in direct action mode.

A filter of the agent is identified by its kind and name. So it can be found, replaced and removed without
changing other filters of the device. Filters are read with raw netlink, since pyroute2 does not know
TCA_BPF_ID. They are changed with pyroute2. All functions use the network namespace of the calling thread. A
device that is gone has no filters, which is an error only for `attach`.

Filters run in the order of their priorities, 1 first. All filters of one priority have one kind and one
protocol. Of the bpf filters of one priority, the newest runs first (cls_bpf_change() of net/sched/cls_bpf.c,
list_add_rcu). A replaced filter keeps its position (list_replace_rcu). So a filter that is added at priority
1 runs first, regardless of other bpf filters. A filter without a priority gets 49152 or less from the kernel
(tcf_auto_prio() of net/sched/cls_api.c).

The qdisc `ingress` is another kind, older than clsact. It has the same parent and only the side ingress. But
it accepts filters "at egress" and runs them at ingress: ingress_tcf_block() of net/sched/sch_ingress.c
ignores the class. So no filters of egress are read from it, and no program is attached to its egress.

Sources: tc(8), tc-bpf(8); include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h; net/sched/cls_api.c;
1f211a1b929c ("net, sched: add clsact qdisc", 4.5).
"""

import contextlib
import enum
import errno
import itertools
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.netlink import iproute, netlink
from ebpfproxy.linux.netlink.netlink import encoded

NAME = "ebpfproxy"
FIRST = 1
"""The priority that runs first. With priority 0 the kernel selects one."""

HANDLES = range(0xEB, 0xEB + 64)
"""Handles of the agent's filters. A new filter gets a free one."""

RTM_NEWQDISC, RTM_GETQDISC = 36, 38
RTM_NEWTFILTER, RTM_GETTFILTER = 44, 46
ETH_P_ALL = 3
TCA_KIND, TCA_OPTIONS, TCA_CHAIN = 1, 2, 11
TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_ID = 6, 7, 8, 11
TCA_BPF_FLAG_ACT_DIRECT = 1
_TC_H_INGRESS = 0xFFFFFFF1  # the parent of both clsact and ingress
_NO_CLASS = 0xFFFF0000  # the qdisc itself: ingress has filters at it, clsact only at its two classes
_TCMSG = struct.Struct("=BxxxiIII")  # struct tcmsg: family, ifindex, handle, parent, info

CLSACT = "clsact"
INGRESS_ONLY = "ingress"


class Side(enum.IntEnum):
    """TC_H_MIN_INGRESS and TC_H_MIN_EGRESS below TC_H_CLSACT: ffff:fff2 and ffff:fff3."""

    INGRESS = 0xFFFFFFF2
    EGRESS = 0xFFFFFFF3


class Filter(NamedTuple):
    """One filter. `protocol` is an Ethernet type in host order, ETH_P_ALL (3) for all.

    `name` and `program_id` exist for the kind bpf only. They are "" and 0 for all others.
    """

    priority: int
    handle: int
    protocol: int
    kind: str
    name: str
    program_id: int
    chain: int = 0

    @property
    def is_own(self) -> bool:
        """Whether it is a filter of ebpfproxy, of this or a previous version."""
        return (self.chain, self.kind, self.name) == (0, "bpf", NAME)

    @property
    def shares_priority(self) -> bool:
        """Whether a bpf filter for all protocols can be added at its priority."""
        return (self.kind, self.protocol) == ("bpf", ETH_P_ALL)

    def __str__(self) -> str:
        """
        >>> str(Filter(1, 1, 3, "bpf", "cil_from_netdev-eth0", 12))
        'cil_from_netdev-eth0 (bpf filter, priority 1, program 12)'
        >>> str(Filter(7, 0x800, 3, "u32", "", 0))
        'u32 filter, priority 7'
        """
        if self.kind == "bpf":
            name = self.name or "unnamed"
            return f"{name} (bpf filter, priority {self.priority}, program {self.program_id})"
        return f"{self.kind} filter, priority {self.priority}"


def filters(ifindex: int, side: Side) -> list[Filter]:
    """All filters of this side, in the order in which they run: of every chain, and of all programs.

    Raises Rejected.
    """
    return [each for each in map(_filter, _filters(ifindex, side)) if each.handle]


def program_id(ifindex: int, side: Side) -> int | None:
    """The program id of the agent's filter that runs first. None if it has none. Raises Rejected."""
    return next((each.program_id for each in filters(ifindex, side) if each.is_own), None)


def before(found: Iterable[Filter]) -> list[Filter]:
    """Those of `found` that run before the agent's filter: others of chain 0. `found`: from `filters`."""
    in_chain_0 = (each for each in found if not each.chain)
    return list(itertools.takewhile(lambda each: not each.is_own, in_chain_0))


def can_advance(found: Iterable[Filter]) -> bool:
    """Whether `attach` would move the agent's filter to an earlier position. `found`: from `filters`."""
    found = [each for each in found if not each.chain]
    best = _best_priority(each for each in found if not each.is_own)
    at_best = [each for each in found if each.priority == best]
    return not (at_best and at_best[0].is_own)


def has_clsact(ifindex: int) -> bool:
    """Whether the device has a clsact, created by any program. Raises Rejected."""
    return _qdisc(ifindex) == CLSACT


def attach(ifindex: int, side: Side, program: Program) -> bool:
    """Attach `program` at the first position that is available. Create a clsact if needed.

    If the agent's filter has that position already, the kernel replaces the program between two packets
    (cls_bpf_change(), list_replace_rcu()). Otherwise a new filter is added, and then the old one is removed.
    A packet in between passes both. Filters of other programs are never changed. One of another kind, or for
    one protocol only, occupies its priority alone. Then the next priority is the first position available.

    Return whether the clsact was created. Raises NotFound if the device is gone, Rejected for other failures.
    Raises Unsupported if the kernel has no clsact or no bpf filters, or the device's qdisc lacks this side.
    """
    action = f"cannot attach to {side.name.lower()} of {iproute.device_name(ifindex)}"
    found = [each for each in filters(ifindex, side) if not each.chain]
    created = _ensure_qdisc(ifindex, side, action)
    own = next((each for each in found if each.is_own), None)
    try:
        with _opened(ifindex, action) as changes:
            if own and not can_advance(found):
                position = _position(side, own.priority, own.handle)
                changes.tc("replace-filter", "bpf", ifindex, fd=program.fd, direct_action=True, **position)
            else:
                priority = _best_priority(each for each in found if not each.is_own)
                position = _position(side, priority, _free_handle(found, priority))
                changes.tc("add-filter", "bpf", ifindex, fd=program.fd, direct_action=True, **position)
                own = None
    except KernelError:
        if created:
            remove_clsact(ifindex)
        raise
    _remove(ifindex, side, [each for each in found if each.is_own and each != own], action)
    return created


def _best_priority(others: Iterable[Filter]) -> int:
    """The lowest priority that is available for the agent's filter. `others` are of chain 0."""
    taken = {each.priority for each in others if not each.shares_priority}
    return next(priority for priority in itertools.count(FIRST) if priority not in taken)


def _free_handle(found: Iterable[Filter], priority: int) -> int:
    """A free handle at the priority. Raises AlreadyExists if there is none."""
    taken = {each.handle for each in found if each.priority == priority}
    for handle in HANDLES:
        if handle not in taken:
            return handle
    raise AlreadyExists(f"all handles of ebpfproxy are taken at priority {priority}", "remove these filters")


def detach(ifindex: int, side: Side) -> bool:
    """Remove the agent's filters; return whether a filter was removed. The clsact stays. Raises Rejected."""
    action = f"cannot detach from {side.name.lower()} of {iproute.device_name(ifindex)}"
    own = [each for each in filters(ifindex, side) if each.is_own]
    return _remove(ifindex, side, own, action)


def _remove(ifindex: int, side: Side, own: list[Filter], action: str) -> bool:
    """Remove filters; return whether any was removed. The device or another process may have removed them."""
    removed = False
    for each in own:
        try:
            with iproute.opened(action) as changes:
                changes.tc("del-filter", "bpf", ifindex, **_position(side, each.priority, each.handle))
            removed = True
        except KernelError:
            if each in filters(ifindex, side):
                raise
    return removed


def remove_clsact(ifindex: int) -> bool:
    """Remove the clsact if neither side has a filter; return whether it was removed. Raises Rejected.

    A filter that another program adds between the check and the removal is removed, too. The kernel cannot
    remove a clsact on the condition that it is empty.
    """
    if not has_clsact(ifindex) or any(_filters(ifindex, side) for side in Side):
        return False
    try:
        with iproute.opened(f"cannot remove clsact from {iproute.device_name(ifindex)}") as changes:
            changes.tc("del", CLSACT, ifindex)
    except KernelError:
        if has_clsact(ifindex):
            raise
        return False
    return True


def try_out(ifindex: int, program: Program) -> None:
    """Create a clsact on a device that has none, and attach `program` to both of its sides.

    For a temporary device: a failure undoes nothing. It uses raw netlink, since loading pyroute2 takes longer
    than these calls. Raises OSError with the kernel's errno.
    """
    create = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
    qdisc = _TCMSG.pack(0, ifindex, _NO_CLASS, _TC_H_INGRESS, 0) + encoded({TCA_KIND: CLSACT})
    netlink.change(socket.NETLINK_ROUTE, RTM_NEWQDISC, qdisc, create)
    options: netlink.Values = {
        TCA_BPF_FD: program.fd,
        TCA_BPF_NAME: NAME,
        TCA_BPF_FLAGS: TCA_BPF_FLAG_ACT_DIRECT,
    }
    values = encoded({TCA_KIND: "bpf", TCA_OPTIONS: options})
    info = FIRST << 16 | socket.htons(ETH_P_ALL)
    for side in Side:
        body = _TCMSG.pack(0, ifindex, HANDLES[0], side, info) + values
        netlink.change(socket.NETLINK_ROUTE, RTM_NEWTFILTER, body, create)


def _position(side: Side, priority: int, handle: int) -> dict[str, Any]:
    """The parameters that identify a filter of the agent on a device."""
    return {"name": NAME, "handle": handle, "prio": priority, "protocol": ETH_P_ALL, "parent": int(side)}


@contextlib.contextmanager
def _opened(ifindex: int, action: str) -> Iterator[Any]:
    """Like iproute.opened, but for ENOENT it raises Unsupported: the kernel lacks these features."""
    try:
        with iproute.opened(action) as changes:
            yield changes
    except NotFound as failure:
        if not iproute.exists(ifindex):
            raise
        hint = "use a kernel with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF"
        raise Unsupported(f"{failure.message}: this kernel lacks clsact or bpf filters", hint) from failure


def _ensure_qdisc(ifindex: int, side: Side, action: str) -> bool:
    """Ensure that a qdisc with this side exists; return whether it was created."""
    if not _qdisc(ifindex):
        with contextlib.suppress(AlreadyExists):  # another program created it since
            with _opened(ifindex, action) as changes:
                changes.tc("add", CLSACT, ifindex)
            return True
    if side is Side.EGRESS and _qdisc(ifindex) == INGRESS_ONLY:
        raise Unsupported(
            f"{action}: another program has an ingress qdisc there",
            "configure its owner to use clsact, which has both sides (tc qdisc add dev ... clsact)",
        )
    return False


def _qdisc(ifindex: int) -> str:
    """The kind of the qdisc with clsact's parent. "" if the qdisc or the device does not exist."""
    request = _TCMSG.pack(0, ifindex, 0, _TC_H_INGRESS, 0)
    try:
        replies = netlink.get(socket.NETLINK_ROUTE, RTM_GETQDISC, request)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return ""
        raise _reading_failed(ifindex, error) from error
    return netlink.text(dict(netlink.attributes(replies[0], _TCMSG.size)).get(TCA_KIND)) if replies else ""


def _filters(ifindex: int, side: Side) -> list[bytes]:
    """Messages about the filters of this side, and one for each priority in use.

    None for egress of the qdisc `ingress`: see the module's docstring.
    """
    found = _dump_filters(ifindex, side)
    if side is Side.EGRESS and found and _dump_filters(ifindex, _NO_CLASS):
        return []
    return found


def _dump_filters(ifindex: int, parent: int) -> list[bytes]:
    request = _TCMSG.pack(0, ifindex, 0, parent, 0)
    try:
        return netlink.dump(socket.NETLINK_ROUTE, RTM_GETTFILTER, request)
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.EINVAL):  # the device or its qdisc is gone
            return []
        raise _reading_failed(ifindex, error) from error


def _filter(message: bytes) -> Filter:
    """From struct tcmsg and its attributes. The handle is 0 if the message is about a priority only."""
    _, _, handle, _, info = _TCMSG.unpack_from(message)
    attributes = dict(netlink.attributes(message, _TCMSG.size))
    kind = netlink.text(attributes.get(TCA_KIND))
    options = dict(netlink.attributes(attributes.get(TCA_OPTIONS, b""), 0)) if kind == "bpf" else {}
    return Filter(
        priority=info >> 16,
        handle=handle,
        protocol=socket.ntohs(info & 0xFFFF),
        kind=kind,
        name=netlink.text(options.get(TCA_BPF_NAME)),
        program_id=netlink.number(options.get(TCA_BPF_ID)),
        chain=netlink.number(attributes.get(TCA_CHAIN)),
    )


def _reading_failed(ifindex: int, error: OSError) -> KernelError:
    return Rejected(f"cannot read the filters of {iproute.device_name(ifindex)}: {error.strerror or error}")
