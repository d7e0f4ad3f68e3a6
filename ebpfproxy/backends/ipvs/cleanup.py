"""Removing what this mode left, or kube-proxy in its mode ipvs: at once, or where another mode serves by
then.

Never IPVS' whole table, as kube-proxy --cleanup does: of virtual servers those that are ours, as
`ownership` has it, and none of another program's, with or without --ipvs-exclude-cidrs.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ebpfproxy.backends.ipvs import addresses
from ebpfproxy.backends.ipvs.entries import Key, Member, Set
from ebpfproxy.backends.ipvs.ip_sets import IpSets
from ebpfproxy.backends.ipvs.layout import OWN_CHAINS
from ebpfproxy.backends.ipvs.ownership import ownership
from ebpfproxy.backends.ipvs.sets import IPVS_IPS, NAMES, NO_LOCAL, NO_LOCAL_BUT_PODS
from ebpfproxy.backends.xtables import cleanup, names
from ebpfproxy.backends.xtables.cleanup import COMMON_CHAINS, are_of_ipvs
from ebpfproxy.backends.xtables.entries import FILTER, NAT
from ebpfproxy.backends.xtables.layout import TableAndName
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.ipvs import ipvs, proc_table
from ebpfproxy.linux.ipvs.ipvs import Operation
from ebpfproxy.linux.ipvs.messages import Listed, ServerKey
from ebpfproxy.linux.netlink import conntrack, dummy, local_addresses
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import State
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, Network, Protocol, parse_address
from ebpfproxy.plan.service_plan import Frontend

log = Logger(__name__)

NOT_ENDED = "Failed to end a flow of IPVS"
"""It ends by its timeout."""

_GUARDS = frozenset({(FILTER, names.IPVS_FILTER), (NAT, names.IPVS_POSTROUTING)})
"""What addresses on kube-ipvs0 need, whichever mode is in force."""

_OPEN = {
    Protocol.TCP: (
        State.ESTABLISHED,
        State.SYN_SENT,
        State.FIN_WAIT1,
        State.FIN_WAIT2,
        State.CLOSE_WAIT,
        State.LAST_ACK,
        State.CLOSING,
    ),
    Protocol.UDP: (State.ESTABLISHED,),
}
"""States in which a socket has a peer to send to."""


def leftovers(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    """Those that the mode iptables has, too, only where rules of this mode are in them."""
    own = OWN_CHAINS | COMMON_CHAINS if are_of_ipvs(chains) else OWN_CHAINS
    return {each for each in chains if each in own}


def remove(excluded: tuple[Network, ...], dry_run: bool = False) -> list[str]:
    """All of it, in the calling thread's network namespace; what was removed, or with `dry_run` would be, a
    line each. Connections by it end. Raises KernelError."""
    left = _Left(excluded)
    lines = cleanup.remove(leftovers, dry_run) if cleanup.any_chain_exists(OWN_CHAINS) else []
    lines += left.described()
    if not dry_run:
        left.remove()
        left.end_flows()
    return lines


def drain(excluded: tuple[Network, ...], translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """What new connections may need, at once: all but virtual servers that have connections, and their
    addresses, which stay until those are gone. What was removed, and whether something is left.

    Addresses also stay as long as a TCP or connected UDP socket of the node has them as its own: as long as
    an address is there, the kernel chooses it for any client, also where the mode that serves sends
    that somewhere. Such a socket could neither send nor hear without it.

    With them stay two chains. KUBE-IPVS-FILTER keeps new connections to these addresses off what listens on
    all of the node's, and asks for connection tracking. KUBE-IPVS-POSTROUTING masquerades what the node sends
    to these addresses, and so from them, which the mode that serves need not do.

    No client reaches those again: the mode that serves translates what they are sent before IPVS sees it.
    UDP flows do not keep a virtual server. They end first, while the virtual servers tell which they are: the
    next datagram is the other mode's. What the rules translated: see `xtables.removal.drain`, also for
    `translates`.

    Raises KernelError.
    """
    left = _Left(excluded)
    busy = {key for key, listed in left.servers.items() if _is_busy(listed)}
    left.end_flows()
    stay = left.release({key.address for key in busy})
    kept = _GUARDS if stay else frozenset()
    lines: list[str] = []
    held = False
    if cleanup.any_chain_exists(OWN_CHAINS - kept):
        lines, held = cleanup.drain(lambda chains: leftovers(chains) - kept, translates)
    lines += left.described(busy, stay)
    left.remove(busy, stay)
    return lines, held or bool(stay)


class _Left:
    """What there is, of both families."""

    def __init__(self, excluded: tuple[Network, ...]) -> None:
        self._sets = IpSets()
        try:
            found: dict[Key, object] = {**self._sets.read(Family)}
        except Unsupported:
            found = {}
        self.sets = [key for key in found if isinstance(key, Set)]
        self._members = [key for key in found if isinstance(key, Member)]
        self.device = addresses.on_device()
        self.has_device = dummy.exists(KUBE_IPVS0)
        self.servers: dict[ServerKey, Listed] = {}
        if (found or self.has_device) and proc_table.read():
            owned = ownership(found, self.device, local_addresses.read(), excluded)
            self.servers = {
                key: listed for key, listed in ipvs.read().items() if owned.is_own(Frontend(*key))
            }

    def described(
        self, busy: Collection[ServerKey] = (), stay: AbstractSet[Address] = frozenset()
    ) -> list[str]:
        """What `remove` removes, with what `release` has."""
        lines = []
        if gone := [key for key in self.servers if key not in busy]:
            lines.append(f"virtual servers: {len(gone)}, such as {min(gone)}")
        if self.has_device and not stay:
            lines.append(f"device {KUBE_IPVS0} with {len(self.device)} addresses")
        elif loose := self.device - stay:
            lines.append(f"addresses on {KUBE_IPVS0}: {len(loose)}")
        if self.sets and not stay:
            lines.append(f"ipsets: {len(self.sets)}")
        return lines

    def end_flows(self) -> None:
        """Of UDP. To the kernel such a flow is one to the Service's address, which no other program
        translates as long as it lasts. Those that another mode translates by now continue.

        Where the kernel reports of no flows, or does not give one up, it ends by its timeout: nothing else
        waits for that. Raises Rejected where the flows cannot be read this time.
        """
        keys = {key for key in self.servers if key.protocol is Protocol.UDP}
        if not keys:
            return
        with contextlib.suppress(Unsupported):
            for flow in conntrack.flows(Protocol.UDP):
                to = ServerKey(flow.destination, flow.destination_port, flow.protocol)
                if to in keys and not flow.is_dnated:
                    _end(flow)

    def release(self, wanted: AbstractSet[Address]) -> AbstractSet[Address]:
        """Take off kube-ipvs0 what is not wanted, and what no socket has as its own; the addresses that stay.

        As long as an address is there, a socket may get it. So the sockets are looked at again when it is
        off, and what one has got meanwhile is there again at once.
        """
        stay = wanted | _of_open_sockets(self.device)
        if loose := self.device - stay:
            rejected = dummy.change_addresses(KUBE_IPVS0, (), loose)
            if taken := _of_open_sockets(loose):
                _raise_first(dummy.change_addresses(KUBE_IPVS0, taken, ()))
                stay |= taken
            _raise_first(rejected)
        return stay

    def remove(self, busy: Collection[ServerKey] = (), stay: AbstractSet[Address] = frozenset()) -> None:
        """All but virtual servers that are `busy`, and the addresses that `stay`, which theirs are among.

        As long as one stays, the sets do, too, since they tell that it is ours; but for members that reject
        what comes to it, as nothing keeps them up to date.
        """
        rejections = ipvs.apply([*_let_go(self.servers, busy)])
        _raise_first({rejection.position: rejection.error for rejection in rejections})
        if stay:
            _raise_first(self._sets.change((), [key for key in self._members if _rejects(key, stay)]))
            return
        if self.has_device:
            dummy.remove(KUBE_IPVS0)
        _raise_first(self._sets.destroy(self.sets))


def _let_go(servers: Mapping[ServerKey, Listed], stay: Collection[ServerKey]) -> Iterator[Operation]:
    """What stays gets no new connections."""
    for key, listed in servers.items():
        if key not in stay:
            yield ipvs.delete_server(key)
            continue
        for real in listed.reals:
            if real.weight:
                yield ipvs.change_real(key, real._replace(weight=0))


def _rejects(key: Member, stay: Collection[Address]) -> bool:
    """Whether rules that stay drop or reject what is sent to this member, of policy Local, or of no address
    that is there any more."""
    base, _ = NAMES[key.set]
    if base == IPVS_IPS:
        return parse_address(key.text) not in stay
    return base in (NO_LOCAL, NO_LOCAL_BUT_PODS)


def _is_busy(listed: Listed) -> bool:
    return listed.server.key.protocol is not Protocol.UDP and listed.connections > 0


def _of_open_sockets(addresses: AbstractSet[Address]) -> set[Address]:
    """Which of these some socket of the node has as its own. Where the kernel lists no sockets, none is known
    of."""
    found: set[Address] = set()
    for protocol, states in _OPEN.items() if addresses else ():
        with contextlib.suppress(Unsupported):
            found |= {sock.source for sock in sockets.read(protocol, states)} & addresses
    return found


def _end(flow: Flow) -> None:
    try:
        conntrack.delete(flow)
    except KernelError as failure:
        log.debug(NOT_ENDED, flow=flow, reason=failure.message)


def _raise_first(rejected: Mapping[Any, KernelError]) -> None:
    for failure in rejected.values():
        raise failure
