"""The actions of ``--fix``: what an agent with the same configuration does at its start, and kernel modules.

No action changes or removes an object of another program. route_localnet is not among them, because the agent
sets it only after the rules that protect the node (CVE-2020-8558).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.ipvs import prerequisites
from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.nat_backend import netfilter_settings
from ebpfproxy.backends.netfilter.sysctls import Sysctl
from ebpfproxy.backends.selection import MODES, is_usable
from ebpfproxy.config import Config
from ebpfproxy.errors import EbpfProxyError, KernelError
from ebpfproxy.linux import modules, mounts, sysctl

_EBPF, _IPVS = "ebpf", "ipvs"
_NAT_MODES = frozenset(mode.name for mode in MODES if mode.uses_kernel_nat)


class Action(NamedTuple):
    """`text`: a command that does the same. `run` raises KernelError."""

    text: str
    run: Callable[[], object]


class Outcome(NamedTuple):
    """`was_run`: False with `--dry-run`. `failure`: None if the action succeeded or was not run."""

    action: str
    was_run: bool
    failure: EbpfProxyError | None = None

    @property
    def state(self) -> str:
        """One of "planned", "done" and "failed"."""
        return "failed" if self.failure else "done" if self.was_run else "planned"


def plan(
    config: Config, selected: str | None, findings: Mapping[str, Sequence[Finding]]
) -> tuple[Action, ...]:
    """Return the actions for the selected mode; without one, for every mode that is not usable.

    Empty if there is nothing to do. `findings`: by mode.
    """
    names = [selected] if selected else [name for name, each in findings.items() if not is_usable(each)]
    actions = (action for name in names for action in _actions(config, name, findings[name]))
    return tuple({each.text: each for each in actions}.values())


def perform(
    replan: Callable[[], Sequence[Action]], announce: Callable[[str], None], dry_run: bool = False
) -> tuple[Outcome, ...]:
    """Run the actions of `replan`, then those that it returns afterwards, until it returns no others.

    A loaded module makes sysctls available that must be set, too. Each action runs once; a failure does not
    end the others. The text is passed to `announce` before. `dry_run`: announce the first ones only.
    """
    outcomes: dict[str, Outcome] = {}
    while new := [each for each in replan() if each.text not in outcomes]:
        outcomes |= {each.text: _perform(each, announce, dry_run) for each in new}
        if dry_run:
            break
    return tuple(outcomes.values())


def _perform(action: Action, announce: Callable[[str], None], dry_run: bool) -> Outcome:
    announce(action.text)
    try:
        if not dry_run:
            action.run()
    except EbpfProxyError as failure:
        return Outcome(action.text, True, failure)
    return Outcome(action.text, not dry_run)


def _actions(config: Config, mode: str, findings: Sequence[Finding]) -> Iterator[Action]:
    for name in dict.fromkeys(name for each in findings if not each.present for name in each.modules):
        yield Action(f"modprobe {name}", lambda name=name: modules.load(name))  # type: ignore[misc]
    if mode == _EBPF:
        yield from _bpffs(config)
    if mode in _NAT_MODES:
        yield from _conntrack(config, mode)
    if mode == _IPVS:
        yield from _ipvs(config)


def _bpffs(config: Config) -> Iterator[Action]:
    path = config.bpffs_root
    mount_point = mounts.BPFFS if path.is_relative_to(mounts.BPFFS) else path
    try:
        is_mounted = mounts.is_on_bpffs(path)
    except KernelError:
        return  # the probe has reported it
    if not is_mounted:
        yield Action(f"mount -t bpf bpf {mount_point}", lambda: mounts.ensure_bpffs(path))


def _conntrack(config: Config, mode: str) -> Iterator[Action]:
    for each in sysctls.desired_sysctls(netfilter_settings(config, mode), sysctls.online_cpus()):
        yield from _sysctl(each)


def _ipvs(config: Config) -> Iterator[Action]:
    for each in prerequisites.desired_sysctls(config.ipvs_strict_arp):
        yield from _sysctl(each)


def _sysctl(wanted: Sysctl) -> Iterator[Action]:
    """Yield nothing if the setting has the value, does not exist (without its module), or is read-only."""
    name, value = wanted.name, str(wanted.value)
    try:
        current = sysctl.read(name)
    except KernelError:
        return
    is_enough = current.isdecimal() and int(current) >= wanted.value if wanted.at_least else current == value
    if not is_enough and sysctl.may_be(name, value):
        yield Action(f"sysctl -w {name.replace('/', '.')}={value}", lambda: sysctl.ensure(name, value))
