"""An agent that is killed, started again, and switched to another mode, while clients run."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.agent.mode_switch import SWITCH_FAILED, SWITCHED
from ebpfproxy.bench import modes as modes_of
from ebpfproxy.bench.sides import PATIENCE
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Agent, Lab
from ebpfproxy.lab.agent import AgentFailed, LogLine, is_sync

_SYNC_WITHIN = 30.0
"""Seconds after which an agent that lives has to have brought something into the kernel; to compile takes
up to a third of it where clients have all CPUs."""

_SWITCHED = f" INFO {SWITCHED} "
_STAYED = f" ERROR {SWITCH_FAILED} "


class FaultSchedule(NamedTuple):
    """What becomes of the agent meanwhile: it is killed and started again every `crash_s` seconds, with other
    programs and maps each time if `replace`; it moves to the next mode every `move_s`. 0: never."""

    crash_s: float = 0.0
    replace: bool = False
    move_s: float = 0.0


class AgentRunner:
    """The agent on the first node, and its successors. Its mode stands in a file, which it follows."""

    def __init__(self, lab: Lab, folder: Path, modes: Sequence[str], faults: FaultSchedule) -> None:
        """Raises ConfigError where it cannot move as it shall."""
        if faults.move_s and len(set(modes)) < 2:
            raise ConfigError(f"{modes[0]} is one mode, and nowhere to move to", "--modes=ebpf,nftables")
        self._lab = lab
        self._folder = folder
        self._modes = modes
        self._fate = faults
        self._crashes = self._moves = 0
        self._syncs_of_previous = 0
        self._file = lab.folder / "configuration.json"
        self._options = modes_of.options_of_one_life(modes)
        self._configure()
        self._agent = self._start()

    def __str__(self) -> str:
        return ", ".join(f"{figure} {name}" for name, figure in self.figures().items())

    def advance(self, elapsed: float) -> None:
        """So many seconds after the beginning. Raises AgentFailed."""
        check_alive(self._agent)
        if self._fate.crash_s and elapsed > self._fate.crash_s * (self._crashes + 1):
            self._crashes += 1
            self._syncs_of_previous += _syncs(self._agent)
            self._agent.kill()
            self._agent = self._start(wait=0)
        if self._fate.move_s and elapsed > self._fate.move_s * (self._moves + 1):
            self._await_moved()
            self._moves += 1
            self._configure()
            self._moving = True

    def end(self) -> None:
        """Raises AgentFailed where it has ended before, or has not switched as configured."""
        check_alive(self._agent)
        self._await_moved()

    def figures(self) -> dict[str, int]:
        syncs = self._syncs_of_previous + _syncs(self._agent)
        return {"syncs": syncs, "crashes": self._crashes, "moves": self._moves}

    @property
    def _mode(self) -> str:
        return self._modes[self._moves % len(self._modes)]

    def _configure(self) -> None:
        body = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": modes_of.base(self._mode),
            "clusterCIDR": ",".join(self._lab.addresses.all_pods),
        }
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        fresh.rename(self._file)

    def _start(self, wait: float = PATIENCE) -> Agent:
        size = [f"--ebpf-affinity-max={65536 + self._crashes % 2}"] if self._fate.replace else []
        self._seen, self._moving = 0, False
        return self._lab.agent(self._folder, f"--config={self._file}", *self._options, *size, wait=wait)

    def _await_moved(self) -> None:
        """Until the agent has done the last switch that was configured. Raises AgentFailed."""
        if self._moving:
            line = self._agent.await_line(_tells_of_move, self._seen, PATIENCE)
            if _SWITCHED not in line.text:
                raise AgentFailed(f"the agent did not move to mode {self._mode}", self._agent.lines)
        self._seen, self._moving = len(self._agent.lines), False


def check_alive(agent: Agent) -> None:
    """Raises AgentFailed where it ended by itself, or has done nothing in `_SYNC_WITHIN` seconds."""
    status = agent.process.poll()
    if status is not None:
        raise AgentFailed(f"the agent ended by itself with status {status}", agent.lines)
    if time.monotonic() - agent.started >= _SYNC_WITHIN and not _syncs(agent):
        raise AgentFailed(f"the agent did not sync once in {_SYNC_WITHIN:.0f} s", agent.lines)


def _tells_of_move(line: LogLine) -> bool:
    return _SWITCHED in line.text or _STAYED in line.text


def _syncs(agent: Agent) -> int:
    return sum(is_sync(line) for line in list(agent.lines))
