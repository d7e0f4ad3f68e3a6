"""Routing by marks that this dataplane cannot follow."""

import errno

from ebpfproxy.dataplanes.findings import Finding
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel import routing
from ebpfproxy.kernel.rtnetlink import RT_TABLE_LOCAL, RT_TABLE_MAIN

FEATURE = "replies routed by marks"
_RT_TABLE_DEFAULT = 253
_USUAL = (RT_TABLE_LOCAL, RT_TABLE_MAIN, _RT_TABLE_DEFAULT)


def probe() -> Finding:
    """Whether replies of this node's endpoints leave by the interface by which the request came in.

    The Amazon VPC CNI routes pods by their source address to the table of a secondary interface, and marks
    connections to the node's own addresses to exempt their replies. Its rules for that run after tc ingress,
    where the destination is an endpoint's already, and do not match.
    """
    try:
        rules = routing.rules()
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return Finding(FEATURE, number, failure.message, failure.hint, needed=False)
    by_source = any(rule.source_length and rule.table not in _USUAL for rule in rules)
    by_mark = any(rule.mark and rule.table == RT_TABLE_MAIN for rule in rules)
    if not (by_source and by_mark):
        return Finding(FEATURE, needed=False)
    return Finding(
        FEATURE,
        errno.EXDEV,
        "routing rules send pods to a table of their own, and marked connections to the main table, as the "
        "Amazon VPC CNI does; connections by a NodePort to a pod of this node get no mark, and replies leave "
        "by another interface",
        "use --proxy-mode=nftables or iptables on this node",
        needed=False,
    )
