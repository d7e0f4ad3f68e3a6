"""The map `netfilter_flows`: connections to Services that netfilter translates, with an address of this node.

They were opened while another mode was active on this node: masqueraded ones, and those of the node itself,
whose sockets are connected to the frontend. Their endpoints receive them from ports of this node that the map
`replies` does not contain, and that no socket with the endpoint as its peer has. If a new flow to the same
endpoint got such a port, its entry would be found first, and the older connection would receive no more
replies. So the programs assign no port that is in this map. They use the map only while NODE_NETFILTER_FLOWS
is set.

An entry is the key of the packets that the endpoint sends, at ingress. It is removed once conntrack no longer
has that connection. The map is pinned, so the next agent removes the entries that this one has added.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import htons, ntohs
from struct import Struct

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import conntrack, local_addresses
from ebpfproxy.model.address import Address, Protocol

_KEY = abi.FLOW_KEY.size
_ZONE = Struct("=I")
_BATCH = 64  # connections looked up without a pause: 3 ms, 50 us each (measured)


class NetfilterFlows:
    """The entries of the map. It calls `note` with True before the first entry is written, and with False
    after the last one is removed.

    `learn` and `forget` may be called in two different threads, but each in one thread only. Raises NotFound
    if the map is not in `maps`.
    """

    def __init__(self, maps: Path, note: Callable[[bool], object]) -> None:
        self._map = Map.pinned(maps / "netfilter_flows")
        self._note = note
        self._lock = threading.Lock()  # one step: writing entries, or finding none, and calling `note`
        self._noted = not self._is_empty()
        note(self._noted)

    def close(self) -> None:
        self._map.close()

    def learn(self) -> int:
        """Add the connections in conntrack, in the calling thread's network namespace. Return their number.

        A connection of a pod that is not masqueraded is skipped, and one whose destination is not translated,
        which belongs to no Service. The result is 0 if conntrack is not active or not supported.

        Raises Rejected, also if the map is full.
        """
        try:
            flows = [flow for flow in conntrack.masqueraded() if _is_dnated(flow)]
            if redirected := list(conntrack.redirected()):
                own = {each.address for each in local_addresses.read()}
                flows += [flow for flow in redirected if flow.source in own]
            found = {_key(flow): _ZONE.pack(flow.reply_zone) for flow in flows}
        except Unsupported:
            return 0
        if found:
            with self._lock:
                self._set(True)
                self._map.update_all(list(found.items()))
        return len(found)

    def forget(self, rest: Callable[[float], bool]) -> int:
        """Remove connections that conntrack no longer has; return their number. `rest`: see `FlowSweep.run`.

        Raises KernelError.
        """
        removed = 0
        for keys, zones in self._map.batches(_BATCH):
            began = time.monotonic()
            for at in range(len(keys) // _KEY):
                key, zone = keys[at * _KEY : (at + 1) * _KEY], zones[at * _ZONE.size : (at + 1) * _ZONE.size]
                removed += _is_over(key, zone) and self._map.delete(key)
            if rest(time.monotonic() - began):
                return removed
        with self._lock:
            if self._noted and self._is_empty():
                self._set(False)
        return removed

    def _set(self, present: bool) -> None:
        if self._noted != present:
            self._note(present)
            self._noted = present

    def _is_empty(self) -> bool:
        return next(self._map.batches(1), None) is None


def _is_dnated(flow: conntrack.Flow) -> bool:
    """Whether its destination is translated. Addresses are compared, since IPVS does not set the DNAT bit."""
    destination = flow.destination, flow.destination_port
    return (flow.reply_source, flow.reply_source_port) != destination


def _key(flow: conntrack.Flow) -> bytes:
    ports = htons(flow.reply_source_port), htons(flow.reply_destination_port)
    return abi.FLOW_KEY.pack(
        flow.reply_source, flow.reply_destination, *ports, flow.protocol, abi.AT_INGRESS, 0
    )


def _is_over(key: bytes, zone: bytes) -> bool:
    source, to, source_port, port, protocol, _, _ = abi.FLOW_KEY.unpack(key)
    replying, client = (Address(source), ntohs(source_port)), (Address(to), ntohs(port))
    return not conntrack.answered_by(Protocol(protocol), replying, client, *_ZONE.unpack(zone))
