"""Named packet counters (nfacct) of the calling thread's network namespace, which rules of iptables increase.

They outlast the rules that use them: a rule that is written again continues to count. A counter cannot be
deleted while a rule uses it. IPv4 and IPv6, legacy and nft use the same counters.

Sources: include/uapi/linux/netfilter/nfnetlink_acct.h; net/netfilter/nfnetlink_acct.c.
"""

import errno

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netlink.conntrack import HEAD, NETLINK_NETFILTER, failure

_SUBSYSTEM = 7 << 8  # NFNL_SUBSYS_ACCT, the upper byte of a message's type
_NEW, _GET, _DELETE = _SUBSYSTEM | 0, _SUBSYSTEM | 1, _SUBSYSTEM | 3  # NFNL_MSG_ACCT_*
_NAME, _PACKETS = 1, 2  # NFACCT_NAME, NFACCT_PKTS


def ensure(name: str) -> None:
    """Create a counter with value 0 unless it exists; `name` has at most 31 bytes.

    Raises Unsupported without CAP_NET_ADMIN or CONFIG_NETFILTER_NETLINK_ACCT, else Rejected.
    """
    try:
        netlink.change(NETLINK_NETFILTER, _NEW, _body(name), netlink.NLM_F_CREATE)
    except OSError as error:
        if error.errno != errno.EBUSY:  # it exists
            raise _failure(f"cannot create the nfacct counter {name}", error) from error


def packets(name: str) -> int | None:
    """The number of packets; None if there is no such counter. Raises Unsupported like `ensure`, Rejected."""
    try:
        (payload,) = netlink.get(NETLINK_NETFILTER, _GET, _body(name))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise _failure(f"cannot read the nfacct counter {name}", error) from error
    return int.from_bytes(dict(netlink.attributes(payload, HEAD.size))[_PACKETS])


def delete(name: str) -> bool:
    """Delete a counter; return False if a rule uses it. Without such a counter, do nothing.

    Raises Unsupported like `ensure`, else Rejected.
    """
    try:
        netlink.change(NETLINK_NETFILTER, _DELETE, _body(name))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno != errno.ENOENT:
            raise _failure(f"cannot delete the nfacct counter {name}", error) from error
    return True


def _body(name: str) -> bytes:
    return HEAD.pack(0, 0, 0) + netlink.encoded({_NAME: name})


def _failure(action: str, error: OSError) -> KernelError:
    return failure(action, error, "load CONFIG_NETFILTER_NETLINK_ACCT: modprobe nfnetlink_acct")
