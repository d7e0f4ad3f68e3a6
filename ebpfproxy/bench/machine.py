"""What a comparison reports about the machine: CPU, kernel, load and versions of programs."""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import ebpfproxy
from ebpfproxy.bench.results import Environment

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_PROGRAMS = {
    "iptables": ("iptables", "--version"),
    "nft": ("nft", "--version"),
}


class Observed:
    """The machine during a run: created at its begin."""

    def __init__(self) -> None:
        self._began, self._load = now(), os.getloadavg()[0]

    def end(self, versions: Iterable[tuple[str, str]] = ()) -> Environment:
        """Return the environment, with further `versions` by program."""
        return Environment(
            kernel=platform.release(),
            cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
            cores=len(os.sched_getaffinity(0)),
            governor=_GOVERNOR.read_text().strip() if _GOVERNOR.exists() else "",
            memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            load_begin=round(self._load, 2),
            load_end=round(os.getloadavg()[0], 2),
            began=self._began,
            ended=now(),
            versions={
                "ebpfproxy": ebpfproxy.__version__,
                "Python": platform.python_version(),
                **{name: found for name, command in _PROGRAMS.items() if (found := _version(command))},
                **dict(versions),
            },
        )


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def cpu_model(cpuinfo: str) -> str:
    """Return the model in /proc/cpuinfo; the architecture if it has none.

    >>> cpu_model("processor : 0\\nmodel name\\t: Xeon 2.5GHz\\n")
    'Xeon 2.5GHz'
    """
    found = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    return found[1] if found else platform.machine()


def _version(command: tuple[str, ...]) -> str:
    """Return the version in the first line of a program's output; "" if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"v?\d+\.\d+\S*(?: \((?:legacy|nf_tables)\))?", done.stdout)
    return found[0] if found else ""
