"""Which mode serves on this machine, and why."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ebpfproxy.backends.ebpf.mode import EbpfMode
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables.mode import IptablesMode
from ebpfproxy.backends.ipvs.mode import IpvsMode
from ebpfproxy.backends.mode import Mode
from ebpfproxy.backends.nftables.mode import NftablesMode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux import capabilities

AUTO = "auto"
MODES: tuple[Mode, ...] = (EbpfMode(), NftablesMode(), IptablesMode(), IpvsMode())
"""In the order in which `auto` takes them."""


_ANY_REMEDY = "run as the agent runs, privileged; or use another --proxy-mode"


class Lack(NamedTuple):
    """What a mode cannot do without, and what to do about it: a line each."""

    reason: str
    remedy: str


class Choice(NamedTuple):
    """`findings` of every mode that was looked at, by its name, in the order of MODES: with `auto` those up
    to the one taken. `wanted` is what the configuration says. `failed`: modes that were not looked at, since
    they had failed before."""

    mode: Mode
    wanted: str
    findings: Mapping[str, tuple[Finding, ...]]
    failed: Mapping[str, Lack] = MappingProxyType({})

    @property
    def why_not(self) -> dict[str, Lack]:
        """By the modes that would have been preferred: what they lack."""
        passed_over = (name for name in self.findings if name != self.mode.name)
        return dict(self.failed) | {name: _lacking(self.findings[name]) for name in passed_over}


def choose(
    config: Config, modes: Sequence[Mode] = MODES, failed: Mapping[str, Lack] = MappingProxyType({})
) -> Choice:
    """The mode that the configuration names, looked at or not, or the first that has all it needs.

    Of the latter, one that has all that is preferred goes first. `auto` does not take a mode that `failed`.
    Raises Unsupported where none has.
    """
    wanted = config.proxy_mode
    if wanted != AUTO:
        return Choice(next(mode for mode in modes if mode.name == wanted), wanted, {})
    findings: dict[str, tuple[Finding, ...]] = {}
    for mode in modes:
        if mode.name not in failed:
            found = findings[mode.name] = look(mode, config)
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
        "ebpfproxy doctor shows what each needs" if may_try else "run as root",
    )


def look(mode: Mode, config: Config) -> tuple[Finding, ...]:
    """As `mode.probe`; a probe that fails as such is a finding, too."""
    try:
        return mode.probe(config)
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return (Finding("probing", number, failure.message, failure.hint),)


def _with_remedy(finding: Finding) -> Finding:
    return finding if finding.present or finding.remedy else finding._replace(remedy=_ANY_REMEDY)


def examine(mode: Mode, config: Config) -> tuple[Finding, ...]:
    """As `look`, and of a usable mode also as `mode.try_out`. Whatever is missing has a remedy."""
    found = look(mode, config)
    if is_usable(found):
        found += mode.try_out(config)
    return tuple(map(_with_remedy, found))


def is_usable(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing that is needed."""
    return all(finding.present or not finding.needed for finding in findings)


def is_preferable(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing for which another mode would be taken."""
    return all(finding.present or not finding.preferred for finding in findings)


def best(findings: Mapping[str, Sequence[Finding]]) -> str | None:
    """The mode that `auto` takes of those that were looked at, given in the order of MODES; None: none works.

    >>> lame, whole = Finding("IPv6", 95, needed=False, preferred=True), Finding("IPv6")
    >>> best({"nftables": [lame], "iptables": [whole]}), best({"nftables": [lame], "iptables": [lame]})
    ('iptables', 'nftables')
    """
    usable = [name for name, found in findings.items() if is_usable(found)]
    preferable = (name for name in usable if is_preferable(findings[name]))
    return next(preferable, usable[0] if usable else None)


def _lacking(findings: Sequence[Finding]) -> Lack:
    missing = [each for each in findings if (each.needed or each.preferred) and not each.present]
    remedies = dict.fromkeys(each.remedy for each in missing if each.remedy)
    return Lack(", ".join(map(str, missing)), "; ".join(remedies) or _ANY_REMEDY)
