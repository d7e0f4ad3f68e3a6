"""Other programs that translate Services on this node: kube-proxy, or a network plugin that replaces it.

Chains and tables of kube-proxy alone are no evidence that it runs: an agent in modes nftables, iptables and
ipvs has objects of the same names, and both leave them when they end.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ebpfproxy.config import Config
from ebpfproxy.diagnose import agent_pages
from ebpfproxy.diagnose.doctor.check import NODE, Check, State
from ebpfproxy.diagnose.doctor.links import Page
from ebpfproxy.diagnose.doctor.plugins import Dataplane, Found, Plugin, shown, translating_programs
from ebpfproxy.diagnose.doctor.traces import Traces
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.linux.processes import Process

PROXY = "no other service proxy"
LEFT_OVER = "no rules of a stopped proxy"

_KUBE_PROXY = "kube-proxy"
_METRICS = ("127.0.0.1", 10249)
"""kube-proxy's default address of /proxyMode and /metrics."""
_MODE = re.compile(r"[a-z]{1,16}")
_OWN_METRIC = "ebpfproxy_info"
_CHAINS = frozenset({"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING"})
_ROUTER_DEVICE = "kube-dummy-if"
"""The device of kube-router's service proxy."""


def checks(found: Sequence[Found], traces: Traces, config: Config) -> Iterator[Check]:
    """At least one row with PROXY, then the others. `found`: the network plugins."""
    proxies, agents = kube_proxies(traces.processes), own_agents(traces.processes)
    runs = bool(agents) or _is_ebpfproxy()
    others = [
        *_kube_proxy(proxies),
        *(() if proxies or runs else _unknown_proxy()),
        *_plugins(found, traces),
    ]
    if others:
        yield from others
    else:
        running = f"an ebpfproxy agent runs: {_pids(agents)}" if agents else ""
        yield Check(NODE, PROXY, State.PRESENT, running, "", Page.OTHER_PROXY)
    if not runs and (traces.own or not others):
        yield _left_over(traces, has_other=bool(others))
    if not (runs or others):
        yield from _ports(traces, config)


def kube_proxies(processes: Sequence[Process]) -> tuple[Process, ...]:
    """Processes of kube-proxy. Distributions that run it in a process of another name, such as k3s, are
    found by /proxyMode."""
    return tuple(each for each in processes if _is_kube_proxy(each.name, _executables(each)))


def _is_kube_proxy(name: str, words: Sequence[str]) -> bool:
    """hyperkube has the components of Kubernetes in one executable."""
    return _KUBE_PROXY in (name, *words[:1]) or tuple(words[:2]) == ("hyperkube", _KUBE_PROXY)


def own_agents(processes: Sequence[Process]) -> tuple[Process, ...]:
    """Processes of `ebpfproxy run`.

    >>> line = ("/usr/bin/python3", "-m", "ebpfproxy", "run", "--v=1")
    >>> [each.pid for each in own_agents([Process(7, "python3", line), Process(8, "bash", ("run",))])]
    [7]
    """
    return tuple(each for each in processes if _is_agent(_executables(each)))


def _executables(process: Process) -> list[str]:
    return [PurePath(word).name for word in process.arguments]


def _is_agent(words: Sequence[str]) -> bool:
    return ("ebpfproxy", "run") in itertools.pairwise(words[:5])


def _pids(processes: Sequence[Process]) -> str:
    return ", ".join(f"process {each.pid}" for each in processes)


def _required(detail: str, remedy: str, page: Page = Page.OTHER_PROXY) -> Check:
    return Check(NODE, PROXY, State.REQUIRED, detail, remedy, page)


def _kube_proxy(proxies: Sequence[Process]) -> Iterator[Check]:
    if proxies:
        mode = proxy_mode()
        detail = f"kube-proxy runs: {_pids(proxies)}" + (f", mode {mode}" if mode else "")
        yield _required(detail, "stop it on this node before the agent starts", Page.MIGRATION)


def _unknown_proxy() -> Iterator[Check]:
    """A proxy whose process is in another PID namespace, or has another name."""
    mode = proxy_mode()
    if mode:
        host, port = _METRICS
        yield _required(
            f"a proxy answers at {host}:{port}/proxyMode: mode {mode}",
            "stop kube-proxy; if the distribution includes it, disable it there (k3s: --disable-kube-proxy)",
        )


def _plugins(found: Sequence[Found], traces: Traces) -> Iterator[Check]:
    for each in found:
        programs = ", ".join(translating_programs(each.plugin, traces)[:4])
        if each.dataplane is Dataplane.REPLACES:
            yield _required(
                f"Cilium replaces kube-proxy: {programs}",
                "set kubeProxyReplacement=false and socketLB.enabled=false in Cilium, and restart its agents",
            )
        elif each.dataplane is Dataplane.EBPF:
            yield _required(
                f"Calico's eBPF dataplane replaces kube-proxy: {programs or 'device bpfin.cali'}",
                "select another dataplane of Calico (linuxDataplane: Iptables, or bpfEnabled: false); "
                "bpfConnectTimeLoadBalancing=Disabled is not enough",
            )
        elif each.plugin is Plugin.KUBE_ROUTER and _ROUTER_DEVICE in traces.devices:
            yield _required(
                f"kube-router translates Services: device {_ROUTER_DEVICE}",
                "set --run-service-proxy=false in kube-router, then run kube-router --cleanup-config",
            )


def _left_over(traces: Traces, has_other: bool) -> Check:
    """`has_other`: another proxy runs, whose rules have the names of kube-proxy's."""
    rules = [
        *sorted(f"chain {name}" for name in _CHAINS & traces.chains.keys()),
        *(["table kube-proxy"] if "kube-proxy" in traces.tables else []),
        *([f"device {KUBE_IPVS0}"] if KUBE_IPVS0 in traces.devices else []),
    ]
    own = [f"of mode {mode}: {', '.join(shown(found))}" for mode, found in traces.own.items()]
    remains = "; ".join([*own, *([", ".join(rules)] if rules and not has_other else [])])
    if not remains:
        return Check(NODE, LEFT_OVER, State.PRESENT, "", "", Page.LEFT_OVER)
    return Check(
        NODE,
        LEFT_OVER,
        State.OPTIONAL,
        f"nothing updates what a stopped proxy has left in force: {remains}",
        "start the agent, which takes them over; or run ebpfproxy cleanup",
        Page.LEFT_OVER,
    )


def _ports(traces: Traces, config: Config) -> Iterator[Check]:
    """Ports of the agent at which another program listens."""
    state = State.REQUIRED if config.bind_address_hard_fail else State.OPTIONAL
    for listen, flag in (
        (config.healthz_listen, "--healthz-bind-address"),
        (config.metrics_listen, "--metrics-bind-address"),
    ):
        if listen and listen[1] in traces.ports:
            yield Check(
                NODE,
                f"free port {listen[1]}",
                state,
                "another program listens there, so the agent's HTTP server may not be able to",
                f"stop that program, or set {flag}",
                Page.PORTS,
            )


def proxy_mode() -> str:
    """The answer at /proxyMode of kube-proxy's default address; "" without a valid one."""
    answer = agent_pages.read_text(_METRICS, "/proxyMode")
    return answer if _MODE.fullmatch(answer) else ""


def _is_ebpfproxy() -> bool:
    return _OWN_METRIC in agent_pages.read_text(_METRICS, "/metrics")
