"""The kernel's settings without which IPVS does not do what Services need (kube-proxy makes the same ones).

kube-proxy also sets conn_reuse_mode to 0 for kernels from 4.1 up to 5.9, whose own way cost each client that
used a port again a second (f0a5e4d7a594, "ipvs: allow connection reuse for unconfirmed conntrack", 5.9). It
then sends new connections to endpoints that are gone (kubernetes issue 81775), so it is left alone here.

Sources: NewProxier() in pkg/proxy/ipvs/proxier.go; Documentation/networking/ipvs-sysctl.rst.
"""

from typing import NamedTuple

from ebpfproxy.backends.netfilter.sysctls import SETTING_CHANGED, SETTING_FAILED
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.log import Logger

log = Logger(__name__)


class Sysctl(NamedTuple):
    """`without`: what does not work where it is not so; `needed`: and that is too much."""

    name: str
    value: str
    without: str
    needed: bool = False


_ALWAYS = (
    Sysctl("net/ipv4/vs/conntrack", "1", "what is masqueraded would be sent on as it is", needed=True),
    Sysctl("net/ipv4/ip_forward", "1", "no endpoint on another node, or in a pod, is reached", needed=True),
    Sysctl(
        "net/ipv4/vs/expire_nodest_conn",
        "1",
        "what is sent on to an endpoint that is gone waits for a timeout",
    ),
    Sysctl(
        "net/ipv4/vs/expire_quiescent_template",
        "1",
        "with session affinity, clients stay with an endpoint that gets no new connections",
    ),
)
_STRICT_ARP = (
    Sysctl("net/ipv4/conf/all/arp_ignore", "1", "the node answers ARP for addresses of Services"),
    Sysctl("net/ipv4/conf/all/arp_announce", "2", "the node announces addresses of Services"),
)
_REMEDY = "make /proc/sys writable to the agent (a privileged container), or set it on the node"


def check() -> None:
    """Sets nothing. Raises Unsupported, as `apply` would, for what is needed, is not so, and is not to be
    written here."""
    lacking = [
        f"sysctl {each.name} is not {each.value}, so {each.without}"
        for each in _ALWAYS
        if each.needed and not sysctl.may_be(each.name, each.value)
    ]
    if lacking:
        raise Unsupported("; ".join(lacking), _REMEDY)


def apply(strict_arp: bool) -> None:
    """Set what is not right, in the calling thread's network namespace, where IPVS is loaded.

    Raises Unsupported, which names all that is needed and cannot be had; what else fails is warned of.
    """
    lacking = []
    for each in (*_ALWAYS, *(_STRICT_ARP if strict_arp else ())):
        try:
            if sysctl.ensure(each.name, each.value):
                log.info(SETTING_CHANGED, name=each.name, value=each.value)
        except KernelError as failure:
            if each.needed:
                lacking.append(
                    f"sysctl {each.name} is not {each.value}, so {each.without}: {failure.message}"
                )
            else:
                log.warning(
                    SETTING_FAILED,
                    name=each.name,
                    value=each.value,
                    without=each.without,
                    reason=failure.message,
                    hint=_REMEDY,
                )
    if lacking:
        raise Unsupported("; ".join(lacking), _REMEDY)
