"""Selects the mode that serves on this machine, and gives the reasons."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux import capabilities
from ebpfproxy.plan.service_plan import Role

AUTO = "auto"
EDGE_MODE = "ebpf"
"""The mode of an edge."""


def _ebpf() -> Mode:
    from ebpfproxy.backends.ebpf.mode import EbpfMode

    return EbpfMode()


def _nftables() -> Mode:
    from ebpfproxy.backends.nftables.mode import NftablesMode

    return NftablesMode()


def _iptables() -> Mode:
    from ebpfproxy.backends.iptables.mode import IptablesMode

    return IptablesMode()


def _ipvs() -> Mode:
    from ebpfproxy.backends.ipvs.mode import IpvsMode

    return IpvsMode()


def _userspace() -> Mode:
    from ebpfproxy.backends.userspace.mode import UserspaceMode

    return UserspaceMode()


class _Deferred:
    """A mode whose package is imported when it is first used, so that a start imports only the modes it
    probes. Any thread may use it.
    """

    def __init__(self, name: str, uses_kernel_nat: bool, load: Callable[[], Mode]) -> None:
        self.name, self.uses_kernel_nat = name, uses_kernel_nat
        self._load = functools.cache(load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)


MODES: tuple[Mode, ...] = (
    cast(Mode, _Deferred("ebpf", False, _ebpf)),
    cast(Mode, _Deferred("nftables", True, _nftables)),
    cast(Mode, _Deferred("iptables", True, _iptables)),
    cast(Mode, _Deferred("ipvs", True, _ipvs)),
    cast(Mode, _Deferred("userspace", False, _userspace)),
)
"""All modes, in the order in which `auto` prefers them."""


_ANY_REMEDY = "run as the agent does, privileged, or select another --proxy-mode"


class Lack(NamedTuple):
    """What a mode requires but lacks, and the remedy. One line each."""

    reason: str
    remedy: str


class Choice(NamedTuple):
    """The selected mode, and the findings that led to it.

    - `wanted`: the mode in the configuration, or AUTO.
    - `findings`: the findings of each probed mode by its name, in the order of MODES. With AUTO, the modes up
      to the selected one.
    - `failed`: modes that were not probed because they failed before.
    """

    mode: Mode
    wanted: str
    findings: Mapping[str, tuple[Finding, ...]]
    failed: Mapping[str, Lack] = MappingProxyType({})

    @property
    def why_not(self) -> dict[str, Lack]:
        """What the modes with a higher preference lack, by name."""
        more_preferred = (name for name in self.findings if name != self.mode.name)
        return dict(self.failed) | {name: _lacking(self.findings[name]) for name in more_preferred}


def choose(
    config: Config, modes: Sequence[Mode] = MODES, failed: Mapping[str, Lack] = MappingProxyType({})
) -> Choice:
    """Return the mode that the configuration names, without probing it, or the first mode that has everything
    it needs.

    Among the latter, a mode that also has all preferred features wins. `auto` skips the modes in `failed`.
    For an edge there is only mode ebpf. Raises Unsupported if no mode is usable.
    """
    wanted = config.proxy_mode
    if config.role is Role.EDGE:
        modes = [mode for mode in modes if mode.name == EDGE_MODE]
    if wanted != AUTO:
        return Choice(next(mode for mode in modes if mode.name == wanted), wanted, {})
    findings: dict[str, tuple[Finding, ...]] = {}
    for mode in modes:
        if mode.name not in failed:
            found = findings[mode.name] = probe(mode, config)
            if is_usable(found) and is_preferable(found):
                break
    chosen = best(findings)
    if chosen:
        mode = next(mode for mode in modes if mode.name == chosen)
        return Choice(mode, wanted, findings, failed)
    lacks = dict(failed) | {name: _lacking(found) for name, found in findings.items()}
    reasons = "; ".join(f"{mode.name}: {lacks[mode.name].reason}" for mode in modes)
    may_try = capabilities.NET_ADMIN in capabilities.capabilities()
    raise Unsupported(
        f"no mode works on this machine: {reasons}",
        "run ebpfproxy doctor to see what each mode requires" if may_try else "run as root",
    )


def probe(mode: Mode, config: Config) -> tuple[Finding, ...]:
    """Return the findings of `mode.probe`. If the probe itself fails, return the failure as a finding."""
    try:
        return mode.probe(config)
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return (Finding("probing", number, failure.message, failure.hint),)


def _with_remedy(finding: Finding) -> Finding:
    return finding if finding.present or finding.remedy else finding._replace(remedy=_ANY_REMEDY)


def examine(mode: Mode, config: Config) -> tuple[Finding, ...]:
    """Return the findings of `probe`, for a usable mode also of `try_out`. Missing features have remedies."""
    findings = probe(mode, config)
    if is_usable(findings):
        findings += mode.try_out(config)
    return tuple(map(_with_remedy, findings))


def is_usable(findings: Sequence[Finding]) -> bool:
    """Return whether no needed feature is missing."""
    return all(finding.present or not finding.needed for finding in findings)


def is_preferable(findings: Sequence[Finding]) -> bool:
    """Return whether no preferred feature is missing."""
    return all(finding.present or not finding.preferred for finding in findings)


def best(findings: Mapping[str, Sequence[Finding]]) -> str | None:
    """Return the mode that `auto` selects among the probed ones, which are in the order of MODES; None if
    none is usable.

    >>> some, all_ = Finding("IPv6", 95, needed=False, preferred=True), Finding("IPv6")
    >>> best({"nftables": [some], "iptables": [all_]}), best({"nftables": [some], "iptables": [some]})
    ('iptables', 'nftables')
    """
    usable = [name for name, found in findings.items() if is_usable(found)]
    preferable = (name for name in usable if is_preferable(findings[name]))
    return next(preferable, usable[0] if usable else None)


def _lacking(findings: Sequence[Finding]) -> Lack:
    missing = [each for each in findings if (each.needed or each.preferred) and not each.present]
    remedies = dict.fromkeys(each.remedy for each in missing if each.remedy)
    return Lack(", ".join(map(str, missing)), "; ".join(remedies) or _ANY_REMEDY)
