"""Probes whether this machine can forward established flows by a flowtable."""

import errno
import functools

from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import flowtables, messages, tool
from ebpfproxy.linux.nft.messages import Hook, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames

FEATURE = "flowtables"

_MODULES = "nf_flow_table", "nf_flow_table_inet", "nft_flow_offload"
_LACK = "this kernel lacks flowtables, so --nftables-flowtable-devices has no effect"
_REMEDY = f"modprobe -a {' '.join(_MODULES)}; or remove --nftables-flowtable-devices"
_KEPT = "this kernel cannot end flows that a flowtable has, so --nftables-flowtable-devices has no effect"
_MIN_LINUX: tool.Version = (6, 4, 0)
"""9b7c68b3911a ("netfilter: ctnetlink: Support offloaded conntrack entry deletion"). Before it, a UDP client
would keep sending to a removed endpoint. It is not probed, since that would need forwarded packets.
"""


@functools.cache
def probe() -> Finding:
    """Return whether the kernel has flowtables, by trying one in a transaction that is always aborted.

    Later calls in the process return the same.
    """
    table, names = Table("ip", "ebpfproxy-probe"), SetNames()
    operations = [
        messages.add_table(table, dormant=True),
        flowtables.add_flowtable(table, "probe"),
        messages.add_chain(table, "forward", Hook("filter", "forward", 0)),
        *messages.add_rule(table, "forward", Rule("ct state established flow add @probe"), names),
    ]
    try:
        with Session() as session:
            rejections = session.attempt(operations)
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
        return Finding(FEATURE, number, failure.message, failure.hint, needed=False)
    if rejections:
        return Finding(FEATURE, rejections[0].errno, _LACK, _REMEDY, needed=False, modules=_MODULES)
    if tool.linux() < _MIN_LINUX:
        return Finding(FEATURE, errno.EBUSY, _KEPT, "use Linux 6.4 or newer", needed=False)
    return Finding(FEATURE, needed=False)
