"""Sysctls for the kernel's NAT: the size of the conntrack table, timeouts, and route_localnet.

kube-proxy sets the same ones at its start. They are not reset when the agent ends, since other connections
depend on them by then. A failure is only logged. Outside the initial network namespace the size of the table
cannot be set, and in a container /proc/sys may be read-only (kubernetes issue 141943).

Sources: pkg/proxy/conntrack/sysctls.go and cmd/kube-proxy/app/server_linux.go of Kubernetes;
Documentation/networking/nf_conntrack-sysctl.rst; 3183ab8997a4 ("netfilter: conntrack: allow increasing bucket
size via sysctl too").
"""

import dataclasses
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.log import Logger
from ebpfproxy.plan.node_ports import LOOPBACK, plan_node_ports
from ebpfproxy.plan.service_plan import PlanContext

log = Logger(__name__)

SETTING_FAILED = "Cannot change a kernel setting"
"""A sysctl of conntrack, `route_localnet` or IPVS, or IPVS' timeouts."""
SETTING_CHANGED = "Changed a kernel setting"
"""As a flag, or the mode, requires."""

ONLINE_CPUS = Path("/sys/devices/system/cpu/online")

_CONNTRACK = "net/netfilter/nf_conntrack_"
_PER_BUCKET = 4


@dataclasses.dataclass(frozen=True, slots=True)
class NetfilterSettings:
    """The desired settings. 0 leaves a setting unchanged.

    - `max_per_core`, `min_entries`: the conntrack table holds `max_per_core` entries for each CPU of the
      node, but at least `min_entries`. If `max_per_core` is 0, the table stays unchanged.
    - Timeouts in seconds.
    - `tcp_be_liberal`: packets outside the TCP window are not invalid.
    - `route_localnet`: set ROUTE_LOCALNET, for IPv4 in mode iptables (`answers_on_loopback`).
      `desired_sysctls` does not include it, since it is set later.
    """

    max_per_core: int = 32768
    min_entries: int = 131072
    tcp_established: int = 24 * 3600
    tcp_close_wait: int = 3600
    tcp_be_liberal: bool = False
    udp: int = 0
    udp_stream: int = 0
    route_localnet: bool = False


class Sysctl(NamedTuple):
    """One setting below /proc/sys.

    - `at_least`: a larger value is also correct.
    - `without`: the limitation if it has another value. `needed`: the mode cannot serve with it.
    """

    name: str
    value: int
    at_least: bool = False
    without: str = ""
    needed: bool = False

    @property
    def missing(self) -> str:
        return f"sysctl {self.name} is not {self.value}, so {self.without}"


def desired_sysctls(settings: NetfilterSettings, cpus: int) -> tuple[Sysctl, ...]:
    """Return the sysctls to set on a node with that many CPUs.

    The conntrack table grows and never shrinks: a node with a larger table needs it (kubernetes pull request
    142035). There is no upper limit, unlike in kube-proxy since 1.36: an entry takes memory only while it is
    in use.
    """
    return tuple(_desired_sysctls(settings, cpus))


def _desired_sysctls(settings: NetfilterSettings, cpus: int) -> Iterator[Sysctl]:
    if settings.max_per_core:
        entries = max(settings.max_per_core * cpus, settings.min_entries)
        yield Sysctl(f"{_CONNTRACK}max", entries, at_least=True)
        yield Sysctl(f"{_CONNTRACK}buckets", entries // _PER_BUCKET, at_least=True)
    for name, seconds in (
        ("tcp_timeout_established", settings.tcp_established),
        ("tcp_timeout_close_wait", settings.tcp_close_wait),
        ("udp_timeout", settings.udp),
        ("udp_timeout_stream", settings.udp_stream),
    ):
        if seconds:
            yield Sysctl(_CONNTRACK + name, seconds)
    if settings.tcp_be_liberal:
        yield Sysctl(f"{_CONNTRACK}tcp_be_liberal", 1)


REMEDY = "make /proc/sys writable for the agent (privileged container), or set the sysctl on the node"

ROUTE_LOCALNET = Sysctl("net/ipv4/conf/all/route_localnet", 1)
"""Makes the kernel route packets from and to 127.0.0.0/8. This exposes the node's loopback services to
neighbors (CVE-2020-8558), so it is set only after the rules that drop such packets are in force.
"""


def answers_on_loopback(context: PlanContext) -> bool:
    """Return whether NodePorts must answer on 127.0.0.1."""
    return bool(plan_node_ports(frozenset(LOOPBACK[:1]), None, context))


def apply(settings: Iterable[Sysctl]) -> None:
    """Set the sysctls that differ, in the calling thread's network namespace. Log a warning for each failure.

    Call it while they exist: those of conntrack only after the backend is open. Raises Unsupported with all
    that are needed and cannot be set.
    """
    missing = []
    for each in settings:
        try:
            changed = (
                sysctl.ensure_at_least(each.name, each.value)
                if each.at_least
                else sysctl.ensure(each.name, str(each.value))
            )
            if changed:
                log.info(SETTING_CHANGED, name=each.name, value=each.value)
        except KernelError as failure:
            if each.needed:
                missing.append(f"{each.missing}: {failure.message}")
                continue
            log.warning(
                SETTING_FAILED,
                file=str(sysctl.ROOT / each.name),
                value=each.value,
                errno=_errno_name(failure),
                hint=failure.hint,
                **({"without": each.without} if each.without else {}),
            )
    if missing:
        raise Unsupported("; ".join(missing), REMEDY)


def online_cpus() -> int:
    """Return the number of CPUs of the node, even if the agent may use only some of them (kubernetes issue
    99225).
    """
    try:
        return count_cpus(ONLINE_CPUS.read_text())
    except (OSError, ValueError):
        return os.cpu_count() or 1


def count_cpus(text: str) -> int:
    """Return the number of CPUs in a list in the kernel's format.

    >>> count_cpus("0-3,5,8-9")
    7

    Raises ValueError.
    """
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _errno_name(failure: KernelError) -> str:
    number = getattr(failure.__cause__, "errno", None) or 0
    return errno.errorcode.get(number, str(number))
