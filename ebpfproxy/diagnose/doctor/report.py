"""The report of ``ebpfproxy doctor``: reads the node and compares it with the agent's configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends import bridge_checks, firewall_checks, uplink_checks
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.selection import AUTO, MODES, best, examine
from ebpfproxy.config import Config
from ebpfproxy.diagnose.doctor import (
    modes,
    other_proxies,
    plugin_settings,
    plugins,
    remedies,
    socket_path,
    traces,
)
from ebpfproxy.diagnose.doctor.check import NODE, Check, State
from ebpfproxy.diagnose.doctor.cni_files import CniFile
from ebpfproxy.diagnose.doctor.links import Page
from ebpfproxy.diagnose.doctor.plugins import Found
from ebpfproxy.diagnose.doctor.remedies import Action, Outcome
from ebpfproxy.diagnose.doctor.traces import Traces

NO_PLUGIN = "network plugin"


class Report(NamedTuple):
    """`findings`: those of each mode. `selected`: the mode of the agent; None if no mode works. `checks`: all
    rows, modes first."""

    findings: Mapping[str, tuple[Finding, ...]]
    selected: str | None
    reason: str
    checks: tuple[Check, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the selected mode has every feature that it can use, and nothing that any mode requires is
        missing."""
        if self.selected is None or not all(each.present for each in self.findings[self.selected]):
            return False
        return all(each.state is not State.REQUIRED for each in self.checks if each.subject == NODE)


def make_report(config: Config, cni_folder: Path | None = None) -> Report:
    """Probe all modes and read the traces of other programs, in the calling thread's network namespace.

    It takes seconds and changes nothing. `cni_folder`: see `traces.read`.
    """
    findings = {mode.name: examine(mode, config) for mode in MODES}
    selected = config.proxy_mode if config.proxy_mode != AUTO else best(findings)
    reason = "selected by --proxy-mode" if config.proxy_mode != AUTO else "the first that works on this node"
    rows = (
        *(each for name, found in findings.items() for each in modes.checks(name, found)),
        *node_checks(traces.read(config, cni_folder), config, selected),
        *modes.checks(NODE, uplink_checks.probe()),
        *modes.checks(NODE, firewall_checks.probe(config, selected) if selected else ()),
        *modes.checks(NODE, bridge_checks.probe(selected) if selected else ()),
        *socket_path.checks(config),
    )
    return Report(findings, selected, reason, rows)


def fix(
    config: Config, cni_folder: Path | None, announce: Callable[[str], None], dry_run: bool
) -> tuple[Report, tuple[Outcome, ...]]:
    """Run the actions of `remedies`; return the report afterwards, and the outcome of each action."""
    reports: list[Report] = []

    def replan() -> Sequence[Action]:
        latest = make_report(config, cni_folder)
        reports.append(latest)
        return remedies.plan(config, latest.selected, latest.findings)

    outcomes = remedies.perform(replan, announce, dry_run)
    return reports[-1], outcomes


def node_checks(read: Traces, config: Config, selected: str | None) -> Iterator[Check]:
    """Yield what follows from the traces: network plugins, their settings, other service proxies, and traces
    that could not be read."""
    found = plugins.find(read)
    yield from _plugins(found, read.cni, selected)
    yield from plugin_settings.checks(found, read, config, selected)
    yield from other_proxies.checks(found, read, config)
    for subject, failure in read.unread.items():
        remedy = failure.hint or "run as the agent does, privileged"
        yield Check(NODE, f"reading {subject}", State.OPTIONAL, failure.message, remedy, Page.DOCTOR)


def _plugins(found: Sequence[Found], files: Sequence[CniFile], selected: str | None) -> Iterator[Check]:
    for each in found:
        recognized = f"recognized by {', '.join(each.traces)}"
        settings = plugin_settings.advice(each, selected) if selected else ""
        yield Check(NODE, f"network plugin {each.title}", State.PRESENT, recognized, settings, Page.PLUGINS)
    if not found and files:
        called = "; ".join(f"{each.path} has {', '.join(each.types) or 'none'}" for each in files)
        remedy = "see the settings for other plugins"
        yield Check(NODE, NO_PLUGIN, State.PRESENT, f"not a known one: {called}", remedy, Page.PLUGINS)
    elif not found:
        yield Check(
            NODE,
            NO_PLUGIN,
            State.OPTIONAL,
            "there is no CNI configuration, and no trace of a known plugin",
            "name the folder with --cni-config-dir if the node has one; see the settings for other plugins",
            Page.PLUGINS,
        )
