"""Run an agent that is killed, restarted and switched to other modes while clients run."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.agent.mode_switch import SWITCH_FAILED, SWITCHED
from ebpfproxy.bench.modes import base, options_for_switching
from ebpfproxy.bench.sides import PATIENCE
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Agent, Lab
from ebpfproxy.lab.agent import AgentFailed, LogLine, is_sync

_SYNC_TIMEOUT = 30.0
"""Seconds after which a running agent must have completed a sync. Compiling the programs takes up to a third
of it while clients use all CPUs."""

_WITHOUT_INTERVAL = {mode: {"minSyncPeriod": "1ms"} for mode in ("iptables", "nftables", "ipvs")}
"""By default these modes wait for a second since the previous sync."""

_SWITCHED = f" INFO {SWITCHED} "
_SWITCH_FAILED = f" ERROR {SWITCH_FAILED} "


class FaultSchedule(NamedTuple):
    """The faults of the agent during a benchmark.

    It is killed and restarted every `crash_s` seconds; with `replace`, with other maps and programs.
    It switches to the next mode every `switch_s` seconds. 0: never.
    """

    crash_s: float = 0.0
    replace: bool = False
    switch_s: float = 0.0


class AgentRunner:
    """The agent on the first node and its restarts. It takes its mode from a configuration file."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        modes: Sequence[str],
        faults: FaultSchedule,
        flags: Sequence[str] = (),
        *,
        each_sync: bool = False,
    ) -> None:
        """Start the agent with `flags`. Raises ConfigError if it cannot switch among the modes.

        `each_sync`: it syncs without a minimum interval, and logs each sync.
        """
        if faults.switch_s and len(set(modes)) < 2:
            raise ConfigError(
                f"cannot switch modes: --modes names only {modes[0]}",
                "give two or more modes, such as --modes=ebpf,nftables",
            )
        self._lab = lab
        self._folder = folder
        self._modes = modes
        self._faults = faults
        self._crashes = self._switches = 0
        self._syncs_of_previous = 0
        self._file = lab.folder / "configuration.json"
        self._options = [*options_for_switching(modes), *flags, *(["-v=4"] if each_sync else [])]
        self._sections = _WITHOUT_INTERVAL if each_sync else {}
        self._configure()
        self._agent = self._start()

    def __str__(self) -> str:
        return ", ".join(f"{figure} {name}" for name, figure in self.figures().items())

    def advance(self, elapsed: float) -> None:
        """Cause the faults that are due `elapsed` seconds after the start. Raises AgentFailed."""
        check_alive(self._agent)
        if self._faults.crash_s and elapsed > self._faults.crash_s * (self._crashes + 1):
            self.crash()
        if self._faults.switch_s and elapsed > self._faults.switch_s * (self._switches + 1):
            self.switch()

    def crash(self) -> None:
        """Kill the agent and start it again, without waiting for its sync."""
        self._crashes += 1
        self._syncs_of_previous += _syncs(self._agent)
        self._agent.kill()
        self._agent = self._start(wait=0)

    def switch(self) -> None:
        """Begin the switch to the next mode, once the previous one is complete. Raises AgentFailed."""
        self._await_switch()
        self._switches += 1
        self._configure()
        self._switching = True

    @property
    def agent(self) -> Agent:
        """The agent that runs now."""
        return self._agent

    def end(self) -> None:
        """Wait until the agent has synced and switched as configured. Raises AgentFailed otherwise."""
        check_alive(self._agent)
        self._agent.await_sync(timeout=_SYNC_TIMEOUT)
        self._await_switch()

    def figures(self) -> dict[str, int]:
        syncs = self._syncs_of_previous + _syncs(self._agent)
        return {"syncs": syncs, "crashes": self._crashes, "switches": self._switches}

    @property
    def _mode(self) -> str:
        return self._modes[self._switches % len(self._modes)]

    def _configure(self) -> None:
        body = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": base(self._mode),
            "clusterCIDR": ",".join(self._lab.addresses.all_pods),
            **self._sections,
        }
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(body))
        temporary.rename(self._file)

    def _start(self, wait: float = PATIENCE) -> Agent:
        size = [f"--ebpf-affinity-max={65536 + self._crashes % 2}"] if self._faults.replace else []
        self._checked_lines, self._switching = 0, False
        return self._lab.agent(self._folder, f"--config={self._file}", *self._options, *size, wait=wait)

    def _await_switch(self) -> None:
        """Wait until the agent has completed the last configured switch. Raises AgentFailed."""
        if self._switching:
            line = self._agent.await_line(_is_switch_result, self._checked_lines, PATIENCE)
            if _SWITCHED not in line.text:
                raise AgentFailed(f"the agent did not switch to mode {self._mode}", self._agent.lines)
        self._checked_lines, self._switching = len(self._agent.lines), False


def check_alive(agent: Agent) -> None:
    """Raise AgentFailed if the agent has ended, or has not synced within `_SYNC_TIMEOUT` seconds."""
    status = agent.process.poll()
    if status is not None:
        raise AgentFailed(f"the agent ended by itself with status {status}", agent.lines)
    if time.monotonic() - agent.started >= _SYNC_TIMEOUT and not _syncs(agent):
        raise AgentFailed(f"the agent did not sync within {_SYNC_TIMEOUT:.0f} s", agent.lines)


def _is_switch_result(line: LogLine) -> bool:
    return _SWITCHED in line.text or _SWITCH_FAILED in line.text


def _syncs(agent: Agent) -> int:
    return sum(int(line.values.get("syncs", 1)) for line in list(agent.lines) if is_sync(line))
