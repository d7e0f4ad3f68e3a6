"""Which mode is taken, and what is said of those that are not."""

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


def test_auto_takes_the_first_that_has_all_it_needs() -> None:
    modes = FakeMode("ebpf", THERE, SLOWER), FakeMode("nftables", THERE)
    choice = choose(AUTO, modes)
    assert choice.mode is modes[0]
    assert choice.why_not == {}
    assert "nftables" not in choice.findings  # nobody looked at it


def test_auto_says_why_it_passed_over_a_better_one() -> None:
    modes = FakeMode("ebpf", THERE, NO_CAPABILITY, SLOWER), FakeMode("nftables", THERE)
    choice = choose(AUTO, modes)
    assert choice.mode is modes[1]
    assert choice.why_not == {"ebpf": Lack("bpf(2): programs may not be loaded (EPERM)", "run privileged")}


def test_of_several_things_that_are_missing_each_remedy_is_told_once() -> None:
    lacks = (
        Finding("bpffs", errno.EPERM, "none is mounted", "run privileged"),
        Finding("bcc", errno.ENOENT, "there is none", "install it"),
        NO_CAPABILITY,
        Finding("cookie", errno.ENOENT, "there is none"),
    )
    choice = choose(AUTO, (FakeMode("ebpf", *lacks), FakeMode("nftables", THERE)))
    assert choice.why_not["ebpf"].remedy == "run privileged; install it"


def test_a_mode_that_is_named_is_taken_whatever_it_lacks() -> None:
    modes = FakeMode("ebpf", NO_CAPABILITY), FakeMode("nftables")
    choice = choose(dataclasses.replace(AUTO, proxy_mode="ebpf"), modes)
    assert choice.mode is modes[0]


def test_a_machine_where_no_mode_works_names_what_each_lacks() -> None:
    modes = FakeMode("ebpf", NO_CAPABILITY), FakeMode("nftables", Finding("nft", errno.ENOENT, "no nft"))
    with pytest.raises(Unsupported, match=r"ebpf: bpf\(2\).*nftables: nft: no nft \(ENOENT\)"):
        choose(AUTO, modes)


def test_a_probe_that_fails_as_such_is_something_missing() -> None:
    class Broken(FakeMode):
        def probe(self, config: Config) -> tuple[Finding, ...]:
            raise KernelError("the kernel does not answer", "ask it again")

    (finding,) = probe(Broken("ebpf"), AUTO)
    assert not finding.present
    assert (finding.missing, finding.remedy) == ("the kernel does not answer", "ask it again")


def test_whatever_is_missing_has_a_remedy() -> None:
    mode = FakeMode("ebpf", Finding("cookie", errno.ENOENT, "there is none"), THERE)
    missing, there = examine(mode, AUTO)
    assert missing.remedy
    assert not there.remedy


def test_what_takes_seconds_is_tried_out_only_of_a_mode_that_looks_usable() -> None:
    usable, other = FakeMode("ebpf", THERE, SLOWER), FakeMode("nftables", NO_CAPABILITY)
    usable.trial = other.trial = (Finding("programs", errno.EACCES, "one is rejected"),)
    assert [finding.feature for finding in examine(usable, AUTO)] == ["maps", "coarse clock", "programs"]
    assert examine(usable, AUTO)[-1].remedy
    assert examine(other, AUTO) == (NO_CAPABILITY,)
    choose(AUTO, (usable, other))
    assert usable.tried_out == 2, "an agent loads the programs anyway"


LAME = Finding("IPv6", errno.EOPNOTSUPP, "there is none", "load it", needed=False, preferred=True)


def test_a_mode_that_lacks_what_is_preferred_is_taken_after_those_that_have_it() -> None:
    modes = FakeMode("nftables", THERE, LAME), FakeMode("iptables", THERE)
    choice = choose(AUTO, modes)
    assert choice.mode is modes[1]
    assert choice.why_not == {"nftables": Lack(str(LAME), "load it")}


def test_where_all_lack_what_is_preferred_the_first_that_works_is_taken() -> None:
    modes = FakeMode("ebpf", NO_CAPABILITY), FakeMode("nftables", THERE, LAME), FakeMode("iptables", LAME)
    assert choose(AUTO, modes).mode is modes[1]


def test_a_mode_that_failed_is_not_looked_at_again() -> None:
    modes = FakeMode("ebpf", THERE), FakeMode("nftables", THERE)
    failed = {"ebpf": Lack("a program is rejected", "use another kernel")}
    choice = choose(AUTO, modes, failed)
    assert (choice.mode, choice.why_not) == (modes[1], failed)
    named = choose(dataclasses.replace(AUTO, proxy_mode="ebpf"), modes, failed)
    assert named.mode is modes[0]
    with pytest.raises(Unsupported, match="ebpf: a program is rejected"):
        choose(AUTO, modes[:1], failed)
