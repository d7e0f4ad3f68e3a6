"""The proxies that a comparison starts: the agent in a mode, a kube-proxy binary in a mode, or none."""

import contextlib
import time
from pathlib import Path
from typing import Protocol

from ebpfproxy.backends import selection
from ebpfproxy.bench import kube_proxy, modes
from ebpfproxy.bench.changes import answering_endpoint
from ebpfproxy.bench.kube_proxy import KubeProxy
from ebpfproxy.bench.sides import start
from ebpfproxy.bench.source import Source
from ebpfproxy.config import Config
from ebpfproxy.errors import ConfigError, Unsupported
from ebpfproxy.lab import Agent, Lab, Pod
from ebpfproxy.lab.agent import AgentFailed
from ebpfproxy.linux.ipvs import ipvs

_FLAGS = ("--iptables-min-sync-period=0s", "--sync-period=1h")
"""As the configuration of kube-proxy: a change is synced at once, and nothing is compared in between."""

_ATTEMPT, _POLL = 0.02, 0.0005
"""The longest attempt to connect before the Service exists, and the pause between two, in seconds."""

_SLICE = 5.0
"""Seconds between two checks of a proxy that starts."""


class Proxy(Protocol):
    """A running proxy. `started` is its start, in seconds of time.monotonic()."""

    started: float

    def check(self) -> None:
        """Raise EbpfProxyError, with the last log lines, if it has ended."""

    def rss_mb(self) -> float:
        """Return the resident memory of its process, in MB of 10^6 bytes, without tools that it starts."""


class _OfAgent:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.started = agent.started
        self.rss_mb = agent.rss_mb

    def check(self) -> None:
        status = self._agent.process.poll()
        if status is not None:
            raise AgentFailed(f"the agent ended with status {status}", self._agent.lines)


def start_proxy(lab: Lab, mode: str, source: Source, binary: Path | None) -> Proxy | None:
    """Start a proxy on the first node, with the API server of `source`; None for mode none."""
    if mode.startswith(kube_proxy.PREFIX):
        assert binary
        return KubeProxy(lab, binary, mode.removeprefix(kube_proxy.PREFIX))
    cidrs = ",".join(lab.addresses.all_pods)
    local = ("--detect-local-mode=ClusterCIDR", f"--cluster-cidr={cidrs}")
    agents = start(lab, mode, *_FLAGS, *local, *source.flags)
    return _OfAgent(agents[0]) if agents else None


def await_service(client: Pod, proxy: Proxy, service: int, limit: float) -> float | None:
    """Wait until the Service answers; return the seconds since the start of the proxy.

    None if it does not answer within `limit` seconds. Raises EbpfProxyError if the proxy ends.
    """
    end = proxy.started + limit

    def poll() -> float | None:
        until = min(end, time.monotonic() + _SLICE)
        while time.monotonic() < until:
            if answering_endpoint(service, _ATTEMPT) is not None:
                return time.monotonic()
            time.sleep(_POLL)
        return None

    while time.monotonic() < end:
        moment = client.call(poll)
        if moment is not None:
            return moment - proxy.started
        proxy.check()
    return None


def available(binary: Path | None) -> list[str]:
    """Return the modes that this machine supports: of the agent, and of kube-proxy if there is a binary."""
    usable = [
        mode.name
        for mode in selection.MODES
        if selection.is_usable(selection.probe(mode, Config.parse({"proxy_mode": mode.name})))
    ]
    if not usable:
        raise ConfigError("no mode works on this machine", "run ebpfproxy doctor to see what they require")
    return [*usable, *(kube_proxy_modes() if binary else ())]


def kube_proxy_modes() -> list[str]:
    """Return the modes of kube-proxy that this kernel supports, with PREFIX."""
    with contextlib.suppress(Unsupported):
        ipvs.available()
        return [kube_proxy.PREFIX + mode for mode in kube_proxy.MODES]
    return [kube_proxy.PREFIX + mode for mode in kube_proxy.MODES if mode != "ipvs"]


NAMES = (*modes.NAMES, *(kube_proxy.PREFIX + mode for mode in kube_proxy.MODES))
"""The modes that a comparison can have."""
