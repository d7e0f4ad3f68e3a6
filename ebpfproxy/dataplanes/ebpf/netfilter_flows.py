"""The map `netfilter_flows`: connections to Services that netfilter masquerades, and goes on to.

They are of a mode that served this node before. An endpoint sees them come from ports of this node that the
map `flows` knows nothing of; were a new flow to the same endpoint given one of those, its entry would be
found first, and the older connection would hear no more. So the programs give away none that is here.

An entry is the key that the flow would have in `flows` for what its endpoint sends. It goes when conntrack
has that connection no more. All is in the pins: what one agent has learned, the next one forgets in time.
"""

import time
from collections.abc import Callable
from socket import htons, ntohs
from struct import Struct

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.errors import Unsupported
from ebpfproxy.kernel import conntrack
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.model.address import Address, Protocol

_KEY = abi.FLOW_KEY.size
_ZONE = Struct("=I")
_BATCH = 64  # looked up in a row: 3 ms, 50 us each (measured)


def learn(flows: Map) -> int:
    """Put what conntrack has now, of the calling thread's network namespace; how many that is.

    What is masqueraded on its way to where its client dialed is left out: that is no Service's. Nothing where
    conntrack is not at work, or does not tell.

    Raises Rejected, where the map is full, too.
    """
    try:
        found = {
            _key(flow): _ZONE.pack(flow.reply_zone) for flow in conntrack.masqueraded() if _is_sent(flow)
        }
    except Unsupported:
        return 0
    flows.update_all(list(found.items()))
    return len(found)


def forget(flows: Map, rest: Callable[[float], bool]) -> int:
    """Remove what conntrack has no more; how many that was. `rest`: see `FlowSweep.run`.

    Raises KernelError.
    """
    removed = 0
    for keys, zones in flows.batches(_BATCH):
        began = time.monotonic()
        for at in range(len(keys) // _KEY):
            key, zone = keys[at * _KEY : (at + 1) * _KEY], zones[at * _ZONE.size : (at + 1) * _ZONE.size]
            removed += _is_over(key, zone) and flows.delete(key)
        if rest(time.monotonic() - began):
            break
    return removed


def _is_sent(flow: conntrack.Flow) -> bool:
    """Elsewhere than where its client dialed. IPVS does that without the bit of DNAT."""
    dialed = flow.destination, flow.destination_port
    return (flow.reply_source, flow.reply_source_port) != dialed


def _key(flow: conntrack.Flow) -> bytes:
    ports = htons(flow.reply_source_port), htons(flow.reply_destination_port)
    return abi.FLOW_KEY.pack(
        flow.reply_source, flow.reply_destination, *ports, flow.protocol, abi.AT_INGRESS, 0
    )


def _is_over(key: bytes, zone: bytes) -> bool:
    source, to, source_port, port, protocol, _, _ = abi.FLOW_KEY.unpack(key)
    replying, client = (Address(source), ntohs(source_port)), (Address(to), ntohs(port))
    return not conntrack.answered_by(Protocol(protocol), replying, client, *_ZONE.unpack(zone))
