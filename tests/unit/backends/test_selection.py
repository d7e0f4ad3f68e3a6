"""Which mode is selected, and what is reported about the others."""

import dataclasses
import errno

import pytest

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.selection import Lack, choose, examine, probe
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Unsupported
from tests.support.modes import FakeMode

THERE = Finding("maps")
NO_CAPABILITY = Finding("bpf(2)", errno.EPERM, "programs may not be loaded", "run privileged")
SLOWER = Finding("coarse clock", errno.EINVAL, "a slower clock is used", "Linux 5.11", needed=False)
AUTO = Config(hostname_override="here")


def test_auto_selects_the_first_mode_that_has_all_it_needs() -> None:
    modes = FakeMode("ebpf", THERE, SLOWER), FakeMode("nftables", THERE)
    choice = choose(AUTO, modes)
    assert choice.mode is modes[0]
    assert choice.why_not == {}
    assert "nftables" not in choice.findings  # it was not probed


def test_auto_reports_what_a_preferred_mode_lacks() -> None:
    modes = FakeMode("ebpf", THERE, NO_CAPABILITY, SLOWER), FakeMode("nftables", THERE)
    choice = choose(AUTO, modes)
    assert choice.mode is modes[1]
    assert choice.why_not == {"ebpf": Lack("bpf(2): programs may not be loaded (EPERM)", "run privileged")}


def test_each_remedy_is_reported_once() -> None:
    lacks = (
        Finding("bpffs", errno.EPERM, "none is mounted", "run privileged"),
        Finding("bcc", errno.ENOENT, "there is none", "install it"),
        NO_CAPABILITY,
        Finding("cookie", errno.ENOENT, "there is none"),
    )
    choice = choose(AUTO, (FakeMode("ebpf", *lacks), FakeMode("nftables", THERE)))
    assert choice.why_not["ebpf"].remedy == "run privileged; install it"


def test_a_configured_mode_is_selected_whatever_it_lacks() -> None:
    modes = FakeMode("ebpf", NO_CAPABILITY), FakeMode("nftables")
    choice = choose(dataclasses.replace(AUTO, proxy_mode="ebpf"), modes)
    assert choice.mode is modes[0]


def test_if_no_mode_is_usable_the_error_names_what_each_lacks() -> None:
    modes = FakeMode("ebpf", NO_CAPABILITY), FakeMode("nftables", Finding("nft", errno.ENOENT, "no nft"))
    with pytest.raises(Unsupported, match=r"ebpf: bpf\(2\).*nftables: nft: no nft \(ENOENT\)"):
        choose(AUTO, modes)


def test_a_failed_probe_is_a_finding() -> None:
    class Broken(FakeMode):
        def probe(self, config: Config) -> tuple[Finding, ...]:
            raise KernelError("the kernel does not answer", "ask it again")

    (finding,) = probe(Broken("ebpf"), AUTO)
    assert not finding.present
    assert (finding.missing, finding.remedy) == ("the kernel does not answer", "ask it again")


def test_every_missing_feature_has_a_remedy() -> None:
    mode = FakeMode("ebpf", Finding("cookie", errno.ENOENT, "there is none"), THERE)
    missing, there = examine(mode, AUTO)
    assert missing.remedy
    assert not there.remedy


def test_only_a_usable_mode_is_tried_out() -> None:
    usable, other = FakeMode("ebpf", THERE, SLOWER), FakeMode("nftables", NO_CAPABILITY)
    usable.trial = other.trial = (Finding("programs", errno.EACCES, "one is rejected"),)
    assert [finding.feature for finding in examine(usable, AUTO)] == ["maps", "coarse clock", "programs"]
    assert examine(usable, AUTO)[-1].remedy
    assert examine(other, AUTO) == (NO_CAPABILITY,)
    choose(AUTO, (usable, other))
    assert usable.tried_out == 2, "an agent loads the programs anyway"


LAME = Finding("IPv6", errno.EOPNOTSUPP, "there is none", "load it", needed=False, preferred=True)


def test_a_mode_without_a_preferred_feature_is_selected_after_those_with_it() -> None:
    modes = FakeMode("nftables", THERE, LAME), FakeMode("iptables", THERE)
    choice = choose(AUTO, modes)
    assert choice.mode is modes[1]
    assert choice.why_not == {"nftables": Lack(str(LAME), "load it")}


def test_if_all_modes_lack_a_preferred_feature_the_first_usable_one_is_selected() -> None:
    modes = FakeMode("ebpf", NO_CAPABILITY), FakeMode("nftables", THERE, LAME), FakeMode("iptables", LAME)
    assert choose(AUTO, modes).mode is modes[1]


def test_a_failed_mode_is_not_probed_again() -> None:
    modes = FakeMode("ebpf", THERE), FakeMode("nftables", THERE)
    failed = {"ebpf": Lack("a program is rejected", "use another kernel")}
    choice = choose(AUTO, modes, failed)
    assert (choice.mode, choice.why_not) == (modes[1], failed)
    named = choose(dataclasses.replace(AUTO, proxy_mode="ebpf"), modes, failed)
    assert named.mode is modes[0]
    with pytest.raises(Unsupported, match="ebpf: a program is rejected"):
        choose(AUTO, modes[:1], failed)
