"""Which schedulers of IPVS this kernel has."""

from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.netns import netns

KNOWN = ("rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos")
"""Those of Linux 6.12. What another one is called may be said all the same."""

_LONGEST = 15
"""IP_VS_SCHEDNAME_MAXLEN without the zero byte: a message with a longer name is no message to the kernel."""


def check(wanted: str) -> None:
    """Raises Unsupported where the kernel has no such scheduler, and then says which ones it has; or where
    it has no IPVS."""
    with netns.throw_away():
        ipvs.available()
        if _has(wanted):
            return
        found = [each for each in KNOWN if _has(each)]
    raise Unsupported(
        f"this kernel has no scheduler {wanted} for IPVS; it has {', '.join(found) or 'none'}",
        f"modprobe ip_vs_{wanted}, or give another one: --ipvs-scheduler",
    )


def _has(scheduler: str) -> bool:
    if len(scheduler) > _LONGEST:
        return False
    try:
        ipvs.probe_scheduler(scheduler)
    except Unsupported:
        return False
    return True
