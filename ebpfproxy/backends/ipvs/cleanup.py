"""Removes what mode ipvs or kube-proxy's mode ipvs left, either at once or while another mode serves.

Unlike kube-proxy --cleanup, this never removes the complete IPVS table. It removes only the virtual servers
of Services (see `ownership`), and none of another program's, with or without --ipvs-exclude-cidrs.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.cleanup import (
    COMMON_CHAINS,
    any_chain_exists,
    are_of_ipvs,
    drain_chains,
    remove_chains,
)
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, TableAndName
from ebpfproxy.backends.ipvs import addresses, endpoint_networks, return_path, sets
from ebpfproxy.backends.ipvs.entries import OWN_CHAINS, Member, Set
from ebpfproxy.backends.ipvs.sets import (
    IPVS_IPS,
    NAMES,
    NO_LOCAL,
    NO_LOCAL_BUT_PODS,
    OWN_SETS,
    IpSets,
    ownership,
)
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.ipvs import ipvs
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

_GUARDS = frozenset({(FILTER, chains.IPVS_FILTER), (NAT, chains.IPVS_POSTROUTING)})
"""The chains that addresses on kube-ipvs0 require, whichever mode is in force."""

_NOT_KUBE_PROXYS = frozenset({(NAT, chains.IPVS_POSTROUTING), (MANGLE, chains.IPVS_OUT_FILTER)})
"""The chains that kube-proxy does not have."""

_CONNECTED = {
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
"""The states in which a socket has a peer."""


def leftovers(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    """Return the chains to remove. Chains that mode iptables also has are included only if they contain rules
    of mode ipvs.
    """
    own = OWN_CHAINS | COMMON_CHAINS if are_of_ipvs(chains) else OWN_CHAINS
    return {each for each in chains if each in own}


def remove(excluded: tuple[Network, ...], dry_run: bool = False) -> list[str]:
    """Remove everything, in the calling thread's network namespace. Return one line for each removed object;
    with `dry_run`, for each that would be removed.

    Connections through IPVS end. Raises KernelError.
    """
    found_objects = _Leftovers(excluded)
    lines = remove_chains(leftovers, dry_run) if any_chain_exists(OWN_CHAINS) else []
    lines += found_objects.described()
    if not dry_run:
        found_objects.remove()
        found_objects.end_flows()
    return lines


def remove_beside_kube_proxy(dry_run: bool = False) -> list[str]:
    """Remove what kube-proxy's mode ipvs does not use, and so would keep after it has taken over. Return one
    line for each object. Raises KernelError.

    These are two chains, the sets that kube-proxy's rules do not match, and what direct routing and tunnels
    need. A set that a rule still matches stays.
    """
    lines = remove_chains(_not_kube_proxys, dry_run) if any_chain_exists(_NOT_KUBE_PROXYS) else []
    ipsets = IpSets()
    present = ipsets.read(Family) if sets.exist() else {}
    found = [key for key in present if isinstance(key, Set) and NAMES[key.name][0] in OWN_SETS]
    kept = {} if dry_run else ipsets.destroy(found)
    lines += [f"ipset {key.name}" for key in found if key not in kept]
    for path in endpoint_networks.leftovers():
        lines.append(f"devices in network namespace {path}")
        if not dry_run:
            endpoint_networks.remove(path)
    if return_path.read(()) is not None:
        lines.append("sysctls accept_local and rp_filter: restored")
        if not dry_run:
            return_path.restore()
    return lines


def _not_kube_proxys(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    return set(_NOT_KUBE_PROXYS & chains.keys())


def drain(excluded: tuple[Network, ...], translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """Remove everything that new connections may use. Return the removed objects, and whether another call is
    required.

    Virtual servers that have connections stay, and so do their addresses, until these connections end. Also,
    addresses stay as long as a TCP or connected UDP socket of the node uses one as its source: without the
    address, that socket can neither send nor receive. As long as an address exists, the kernel may select it
    as the source for any client, even if the serving mode translates the destination.

    Two chains stay with the addresses:

    - KUBE-IPVS-FILTER keeps new connections to these addresses off sockets that listen on all local
      addresses. It also requests connection tracking.
    - KUBE-IPVS-POSTROUTING masquerades host-originated connections to these addresses, which have them as
      their source. The serving mode need not do that.

    No client reaches the remaining virtual servers, since the serving mode translates packets before IPVS
    sees them. UDP flows do not keep a virtual server. They end first, while the virtual servers still show
    which flows these are. The next datagram is the serving mode's. For connections that rules translated, and
    for `translates`, see `iptables.cleanup.drain_chains`.

    Raises KernelError.
    """
    leftover = _Leftovers(excluded)
    busy = {key for key, listed in leftover.servers.items() if _is_busy(listed)}
    leftover.end_flows()
    stay = leftover.release({key.address for key in busy} | leftover.release_endpoints())
    kept_chains = _GUARDS if stay else frozenset()
    lines: list[str] = []
    needs_next_call = False
    if any_chain_exists(OWN_CHAINS - kept_chains):
        lines, needs_next_call = drain_chains(lambda chains: leftovers(chains) - kept_chains, translates)
    lines += leftover.described(busy, stay)
    leftover.remove(busy, stay)
    return lines, needs_next_call or bool(stay)


class _Leftovers:
    """The objects of the mode that exist, of both families."""

    def __init__(self, excluded: tuple[Network, ...]) -> None:
        self._sets = IpSets()
        found = self._sets.read(Family) if sets.exist() else {}
        self.sets = [key for key in found if isinstance(key, Set)]
        self._members = [key for key in found if isinstance(key, Member)]
        self.device = addresses.on_device()
        self.has_device = dummy.exists(KUBE_IPVS0)
        self.servers: dict[ServerKey, Listed] = {}
        self.namespaces = endpoint_networks.leftovers() if found or self.has_device else []
        if (found or self.has_device) and ipvs.proc_text():
            ownership_ = ownership(found, self.device, local_addresses.read(), excluded)
            self.servers = {
                key: listed for key, listed in ipvs.read().items() if ownership_.is_own(Frontend(*key))
            }

    def described(
        self, busy: Collection[ServerKey] = (), stay: AbstractSet[Address] = frozenset()
    ) -> list[str]:
        """Return one line for each kind of object that `remove` removes with the same arguments."""
        lines = []
        if removed := [key for key in self.servers if key not in busy]:
            lines.append(f"virtual servers: {len(removed)}, such as {min(removed)}")
        if self.namespaces and not stay:
            lines.append(f"devices in network namespaces of endpoints: {len(self.namespaces)} namespaces")
        if self.has_device and not stay and return_path.read(()) is not None:
            lines.append("sysctls accept_local and rp_filter: restored")
        if self.has_device and not stay:
            lines.append(f"device {KUBE_IPVS0} with {len(self.device)} addresses")
        elif unused := self.device - stay:
            lines.append(f"addresses on {KUBE_IPVS0}: {len(unused)}")
        if self.sets and not stay:
            lines.append(f"ipsets: {len(self.sets)}")
        return lines

    def end_flows(self) -> None:
        """End the UDP flows of IPVS. In conntrack, they are flows to the frontend address without DNAT. Flows
        that another mode already translates continue.

        A flow that the kernel does not list or delete ends by its timeout, since no later step depends on it.
        Raises Rejected if the flows cannot be read this time.
        """
        keys = {key for key in self.servers if key.protocol is Protocol.UDP}
        if not keys:
            return
        with contextlib.suppress(Unsupported):
            for flow in conntrack.flows(Protocol.UDP):
                frontend = ServerKey(flow.destination, flow.destination_port, flow.protocol)
                if frontend in keys and not flow.is_dnated:
                    _end(flow)

    def release_endpoints(self) -> set[Address]:
        """Remove what endpoints have for untranslated packets, except in namespaces where connected TCP
        sockets use an address of Services. Return those addresses.
        """
        return {each for path in self.namespaces for each in endpoint_networks.remove(path, only_unused=True)}

    def release(self, wanted: AbstractSet[Address]) -> AbstractSet[Address]:
        """Remove from kube-ipvs0 the addresses that are neither in `wanted` nor used by a socket. Return the
        remaining addresses.

        A socket may select an address as long as it exists. So the sockets are read again after the removal,
        and addresses that one selected in between are added back at once.
        """
        stay = wanted | _source_addresses(self.device)
        if unused := self.device - stay:
            rejected = dummy.change_addresses(KUBE_IPVS0, (), unused)
            if selected := _source_addresses(unused):
                _raise_first(dummy.change_addresses(KUBE_IPVS0, selected, ()))
                stay |= selected
            _raise_first(rejected)
        return stay

    def remove(self, busy: Collection[ServerKey] = (), stay: AbstractSet[Address] = frozenset()) -> None:
        """Remove everything but the `busy` virtual servers and the addresses in `stay`, which include those
        of the `busy` ones.

        As long as an address stays, the sets stay as well, since they mark it as the mode's own. Only members
        that reject packets are removed, as they are no longer updated.
        """
        rejections = ipvs.apply([*_delete_or_drain(self.servers, busy)])
        _raise_first({rejection.position: rejection.error for rejection in rejections})
        if stay:
            _raise_first(self._sets.change((), [key for key in self._members if _rejects(key, stay)]))
            return
        for path in self.namespaces:
            endpoint_networks.remove(path)
        return_path.restore()
        if self.has_device:
            dummy.remove(KUBE_IPVS0)
        _raise_first(self._sets.destroy(self.sets))


def _delete_or_drain(servers: Mapping[ServerKey, Listed], stay: Collection[ServerKey]) -> Iterator[Operation]:
    """Yield the operations that delete virtual servers, and keep those in `stay` from getting new
    connections.
    """
    for key, listed in servers.items():
        if key not in stay:
            yield ipvs.delete_server(key)
            continue
        for real in listed.reals:
            if real.weight:
                yield ipvs.change_real(key, real._replace(weight=0))


def _rejects(key: Member, stay: Collection[Address]) -> bool:
    """Return whether the remaining rules reject or drop packets for this member: one for policy Local, or for
    an address that no longer exists.
    """
    base, _ = NAMES[key.set]
    if base == IPVS_IPS:
        return parse_address(key.text) not in stay
    return base in (NO_LOCAL, NO_LOCAL_BUT_PODS)


def _is_busy(listed: Listed) -> bool:
    return listed.server.key.protocol is not Protocol.UDP and listed.connections > 0


def _source_addresses(addresses: AbstractSet[Address]) -> set[Address]:
    """Return the addresses that a socket of the node has as its source. If the kernel lists no sockets of a
    protocol, none of it counts.
    """
    found: set[Address] = set()
    for protocol, states in _CONNECTED.items() if addresses else ():
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
