"""Finds bridges on which replies between pods are not translated back.

Client and endpoint may be ports of one bridge, as with the CNI plugin bridge. The request passes the node's
NAT, since it is sent to the gateway. The reply is for the client itself, so the bridge forwards it. Only with
br_netfilter does it pass conntrack, which restores the address of the Service. Without, the client gets it
from an address that it does not know, and resets the connection.
"""

import errno
from collections.abc import Iterator

from ebpfproxy.backends.findings import Finding
from ebpfproxy.config.derived import IPVS
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import links
from ebpfproxy.model.device import PAIRS

REPLIES = "replies between pods of"
"""The beginning of the feature; the names of bridges follow."""

_MODES = ("nftables", "iptables", IPVS)
_SYSCTLS = ("net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables")


def probe(mode: str) -> tuple[Finding, ...]:
    """Return the finding for a mode in the calling thread's network namespace.

    Empty without a bridge that has pods, or if the mode does not use the kernel's NAT.
    """
    if mode not in _MODES:
        return ()
    try:
        return tuple(_bridges())
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return (Finding(f"{REPLIES} bridges", number, failure.message, failure.hint, needed=False),)


def _bridges() -> Iterator[Finding]:
    devices = links.read()
    ports = [each.master for each in devices if each.kind in PAIRS and each.peer_elsewhere]
    bridges = [each.name for each in devices if each.kind == "bridge" and each.ifindex in ports]
    if not bridges:
        return
    feature = f"{REPLIES} {', '.join(bridges)}"
    off = [name for name in _SYSCTLS if not _is_on(name)]
    if not off:
        yield Finding(feature, needed=False)
        return
    settings = " ".join(f"{name.replace('/', '.')}=1" for name in off)
    yield Finding(
        feature,
        errno.ENOENT,
        "the bridge forwards them past NAT, so pods do not reach endpoints on the same bridge",
        f"modprobe br_netfilter; sysctl -w {settings}",
        needed=False,
    )


def _is_on(name: str) -> bool:
    """Whether br_netfilter passes packets of this family to netfilter. False without the module."""
    try:
        return sysctl.read(name) == "1"
    except NotFound:
        return False
