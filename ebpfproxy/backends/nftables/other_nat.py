"""Whether the kernel asks our chains of type nat beside those of others, found by trying.

Before Linux 4.18 (the wiki of nftables, "List of updates since Linux kernel 3.13") the first
NAT that a connection comes to settles it, be that a chain without a rule, and no other one is asked. The
kubelet's and most network plugins' NAT is there on every node.
"""

import contextlib
import socket

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.compile import compile_rule
from ebpfproxy.linux.nft.messages import Hook, Operation, SetNames, Table
from ebpfproxy.linux.nft.nft import Session

_DIALED, _SERVER = "127.0.0.2", "127.0.0.1"
_PATIENCE = 1.0  # seconds; over loopback there is an answer at once


def is_asked() -> bool:
    """Over loopback in a network namespace of its own; where there can be none, it is taken to be so."""
    with contextlib.suppress(KernelError, OSError), netns.throw_away():
        netns.set_loopback_up()
        with socket.create_server((_SERVER, 0)) as server, Session() as session:
            if session.commit(_operations(server.getsockname()[1])):
                return False
            return _connects()
    return True


def _connects() -> bool:
    try:
        socket.create_connection((_DIALED, 1), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


def _operations(port: int) -> list[Operation]:
    """Another program's empty chain, and behind it one that translates."""
    other, ours = Table("ip", "ebpfproxy-other"), Table("ip", "ebpfproxy-probe")
    rule = compile_rule(f"ip daddr {_DIALED} meta l4proto tcp dnat to {_SERVER}:{port}", "ip")
    return [
        messages.add_table(other),
        messages.add_chain(other, "nat", Hook("nat", "output", -101)),
        messages.add_table(ours),
        messages.add_chain(ours, "nat", Hook("nat", "output", -100)),
        *messages.add_rule(ours, "nat", rule, SetNames()),
    ]
