"""The actions of `doctor --fix`: which ones are planned, and how they run."""

import dataclasses
import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from ebpfproxy.backends.findings import Finding
from ebpfproxy.config import Config
from ebpfproxy.diagnose.doctor import remedies
from ebpfproxy.diagnose.doctor.remedies import Action
from ebpfproxy.errors import Rejected
from ebpfproxy.linux import sysctl

CONFIG = Config(hostname_override="here")
LACKS_NAT = Finding("DNAT", errno.ENOENT, "none", "modprobe nft_nat", modules=("nft_nat",))
ESTABLISHED = "net/netfilter/nf_conntrack_tcp_timeout_established"


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder instead of /proc/sys: no sysctl exists."""
    monkeypatch.setattr(sysctl, "ROOT", tmp_path)
    return tmp_path


def texts(config: Config, selected: str | None, findings: Mapping[str, tuple[Finding, ...]]) -> list[str]:
    return [each.text for each in remedies.plan(config, selected, findings)]


def write(settings: Path, name: str, value: str) -> None:
    (settings / name).parent.mkdir(parents=True, exist_ok=True)
    (settings / name).write_text(value)


def test_each_missing_module_is_loaded_once() -> None:
    both = LACKS_NAT._replace(modules=("nft_nat", "nft_fib"))
    assert texts(CONFIG, "nftables", {"nftables": (LACKS_NAT, both)}) == [
        "modprobe nft_nat",
        "modprobe nft_fib",
    ]


def test_modules_of_present_features_and_of_other_modes_are_not_loaded() -> None:
    present = Finding("DNAT", modules=("nft_nat",))
    findings = {"nftables": (present,), "iptables": (LACKS_NAT,)}
    assert texts(CONFIG, "nftables", findings) == []


def test_without_a_usable_mode_all_modes_are_prepared() -> None:
    other = LACKS_NAT._replace(modules=("xt_nat",))
    findings = {"nftables": (LACKS_NAT,), "iptables": (other,)}
    assert texts(CONFIG, None, findings) == ["modprobe nft_nat", "modprobe xt_nat"]


def test_sysctls_that_differ_are_set_as_the_agent_sets_them(settings: Path) -> None:
    write(settings, ESTABLISHED, "432000\n")
    write(settings, "net/netfilter/nf_conntrack_max", "1000000000")
    (action,) = remedies.plan(CONFIG, "nftables", {"nftables": ()})
    assert action.text == f"sysctl -w {ESTABLISHED.replace('/', '.')}=86400"
    action.run()
    assert (settings / ESTABLISHED).read_text() == "86400"
    assert remedies.plan(CONFIG, "nftables", {"nftables": ()}) == ()


def test_mode_ebpf_needs_no_sysctls_of_conntrack(settings: Path, tmp_path: Path) -> None:
    write(settings, ESTABLISHED, "432000")
    config = dataclasses.replace(CONFIG, bpffs_root=tmp_path / "bpf")
    assert texts(config, "ebpf", {"ebpf": ()}) == [f"mount -t bpf bpf {tmp_path}/bpf"]


def test_the_sysctls_of_ipvs_follow_the_flags(settings: Path) -> None:
    write(settings, "net/ipv4/conf/all/arp_ignore", "0")
    write(settings, "net/ipv4/ip_forward", "0")
    assert texts(CONFIG, "ipvs", {"ipvs": ()}) == ["sysctl -w net.ipv4.ip_forward=1"]
    strict = dataclasses.replace(CONFIG, ipvs_strict_arp=True)
    assert "sysctl -w net.ipv4.conf.all.arp_ignore=1" in texts(strict, "ipvs", {"ipvs": ()})


def test_route_localnet_is_left_to_the_agent(settings: Path) -> None:
    write(settings, "net/ipv4/conf/all/route_localnet", "0")
    assert texts(CONFIG, "iptables", {"iptables": ()}) == []


def test_each_action_is_announced_before_it_runs_and_a_failure_ends_none() -> None:
    log: list[str] = []

    def fail() -> None:
        log.append("ran a")
        raise Rejected("cannot do a", "do b")

    actions = Action("a", fail), Action("b", lambda: log.append("ran b"))
    outcomes = remedies.perform(lambda: actions, lambda text: log.append(f"announced {text}"))
    assert log == ["announced a", "ran a", "announced b", "ran b"]
    assert [(each.state, str(each.failure or "")) for each in outcomes] == [
        ("failed", "cannot do a"),
        ("done", ""),
    ]


def test_a_dry_run_only_announces() -> None:
    log: list[str] = []
    actions = [Action("a", lambda: log.append("ran"))]
    assert [each.state for each in remedies.perform(lambda: actions, log.append, dry_run=True)] == ["planned"]
    assert log == ["a"]


def test_actions_that_others_make_possible_run_in_the_same_fix() -> None:
    """A module has sysctls, which exist only after it is loaded."""
    log: list[str] = []
    sysctls = Action("sysctl", lambda: log.append("set"))
    module = Action("modprobe", lambda: log.append("loaded"))

    def replan() -> list[Action]:
        return [sysctls] if "loaded" in log and "set" not in log else [] if "set" in log else [module]

    outcomes = remedies.perform(replan, log.append)
    assert [(each.action, each.state) for each in outcomes] == [("modprobe", "done"), ("sysctl", "done")]
    assert log == ["modprobe", "loaded", "sysctl", "set"]


def test_an_action_without_effect_does_not_run_again() -> None:
    log: list[str] = []
    remedies.perform(lambda: [Action("a", lambda: None)], log.append)
    assert log == ["a"]
