"""Whether the kernel's connection tracking knows the ports of SCTP. Without, it translates no SCTP port."""

from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux import sysctl

_TRACKING = "net/netfilter/nf_conntrack_max"
_OF_SCTP = "net/netfilter/nf_conntrack_sctp_timeout_established"
"""It exists with CONFIG_NF_CT_PROTO_SCTP (nf_conntrack_standalone.c)."""


def sctp_is_unserved() -> str:
    """Return why no rule can translate SCTP, "" if rules can, or if conntrack is not loaded yet."""
    try:
        sysctl.read(_TRACKING)
    except KernelError:
        return ""
    try:
        sysctl.read(_OF_SCTP)
    except NotFound:
        return "this kernel has no connection tracking of SCTP"
    except KernelError:
        return ""
    return ""
