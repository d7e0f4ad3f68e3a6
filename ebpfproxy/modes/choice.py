"""Which mode serves on this machine, and why."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.config import Config
from ebpfproxy.dataplanes.findings import Finding
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.kernel import rights
from ebpfproxy.modes.ebpf import EbpfMode
from ebpfproxy.modes.iptables import IptablesMode
from ebpfproxy.modes.ipvs import IpvsMode
from ebpfproxy.modes.mode import Mode
from ebpfproxy.modes.nftables import NftablesMode

AUTO = "auto"
MODES: tuple[Mode, ...] = (EbpfMode(), NftablesMode(), IptablesMode(), IpvsMode())
"""In the order in which `auto` takes them."""


class Lack(NamedTuple):
    """What a mode cannot do without, and what to do about it: a line each."""

    reason: str
    remedy: str


class Choice(NamedTuple):
    """`findings` of every mode that was looked at, by its name, in the order of MODES: with `auto` those up
    to the one taken. `wanted` is what the configuration says."""

    mode: Mode
    wanted: str
    findings: Mapping[str, tuple[Finding, ...]]

    @property
    def why_not(self) -> dict[str, Lack]:
        """By the modes that would have been preferred: what they lack."""
        passed_over = (name for name in self.findings if name != self.mode.name)
        return {name: _lacking(self.findings[name]) for name in passed_over}


def choose(config: Config, modes: Sequence[Mode] = MODES) -> Choice:
    """The mode that the configuration names, looked at or not, or the first that has all it needs.

    Raises Unsupported where none has.
    """
    wanted = config.proxy_mode
    if wanted != AUTO:
        return Choice(next(mode for mode in modes if mode.name == wanted), wanted, {})
    findings: dict[str, tuple[Finding, ...]] = {}
    for mode in modes:
        found = findings[mode.name] = look(mode, config)
        if is_usable(found):
            return Choice(mode, wanted, findings)
    may_try = rights.NET_ADMIN in rights.capabilities()
    raise Unsupported(
        "no mode works on this machine: "
        + "; ".join(f"{name}: {_lacking(found).reason}" for name, found in findings.items()),
        "ebpfproxy doctor shows what each needs" if may_try else "run as root",
    )


def look(mode: Mode, config: Config) -> tuple[Finding, ...]:
    """As `mode.probe`; a probe that fails as such is a finding, too."""
    try:
        return mode.probe(config)
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return (Finding("probing", number, failure.message, failure.hint),)


def is_usable(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing that is needed."""
    return all(finding.present or not finding.needed for finding in findings)


def _lacking(findings: Sequence[Finding]) -> Lack:
    missing = [each for each in findings if each.needed and not each.present]
    remedies = dict.fromkeys(each.remedy for each in missing if each.remedy)
    return Lack(", ".join(map(str, missing)), "; ".join(remedies))
