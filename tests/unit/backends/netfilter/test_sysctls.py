"""The desired sysctls, and their files in a folder that replaces /proc/sys."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.sysctls import NetfilterSettings, Sysctl, count_cpus, desired_sysctls
from ebpfproxy.linux import sysctl
from ebpfproxy.plan.service_plan import PlanContext
from tests.support.build import networks

NOTHING = NetfilterSettings(max_per_core=0, tcp_established=0, tcp_close_wait=0)
CONNTRACK = "net/netfilter/nf_conntrack_"
LOCALNET = "net/ipv4/conf/all/route_localnet"


def test_defaults_are_those_of_kube_proxy() -> None:
    assert desired_sysctls(NetfilterSettings(), 2) == (
        Sysctl(f"{CONNTRACK}max", 131072, at_least=True),
        Sysctl(f"{CONNTRACK}buckets", 32768, at_least=True),
        Sysctl(f"{CONNTRACK}tcp_timeout_established", 86400),
        Sysctl(f"{CONNTRACK}tcp_timeout_close_wait", 3600),
    )


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 24), st.integers(1, 512))
def test_the_table_size_depends_on_cpus_and_has_a_minimum(per_core: int, least: int, cpus: int) -> None:
    size, buckets = desired_sysctls(
        dataclasses.replace(NOTHING, max_per_core=per_core, min_entries=least), cpus
    )
    assert size.value == max(per_core * cpus, least)
    assert buckets.value == size.value // 4


def test_zero_leaves_every_setting_unchanged_including_the_minimum() -> None:
    assert desired_sysctls(NOTHING, 64) == ()


def test_each_further_setting_is_included_if_configured() -> None:
    settings = dataclasses.replace(NOTHING, tcp_be_liberal=True, udp=60, udp_stream=180, route_localnet=True)
    assert desired_sysctls(settings, 2) == (
        Sysctl(f"{CONNTRACK}udp_timeout", 60),
        Sysctl(f"{CONNTRACK}udp_timeout_stream", 180),
        Sysctl(f"{CONNTRACK}tcp_be_liberal", 1),
    ), "route_localnet is set later, once its guard is in force"
    assert Sysctl(LOCALNET, 1) == sysctls.ROUTE_LOCALNET


@pytest.mark.parametrize(
    ("context", "answers"),
    [
        (PlanContext("here"), True),
        (PlanContext("here", node_port_cidrs=networks(["192.0.2.0/24"])), False),
        (PlanContext("here", node_port_cidrs=networks(["2001:db8::/32"])), True),
        (PlanContext("here", node_port_cidrs=networks(["192.0.2.0/24", "127.0.0.1/32"])), True),
        (PlanContext("here", node_port_primary=True), False),
        (PlanContext("here", localhost_node_ports=False), False),
    ],
)
def test_node_ports_answer_on_loopback_if_the_options_allow_it(context: PlanContext, answers: bool) -> None:
    assert sysctls.answers_on_loopback(context) is answers


@pytest.fixture
def proc_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return /proc/sys of a kernel that tracks connections, with default values."""
    monkeypatch.setattr(sysctl, "ROOT", tmp_path)
    values = {"max": 65536, "buckets": 65536, "tcp_timeout_established": 432000, "tcp_timeout_close_wait": 60}
    (tmp_path / CONNTRACK).parent.mkdir(parents=True)
    for name, value in values.items():
        (tmp_path / f"{CONNTRACK}{name}").write_text(f"{value}\n")
    return tmp_path


def values(proc_sys: Path) -> list[int]:
    """Return the size of the table, its buckets, and two timeouts."""
    names = ("max", "buckets", "tcp_timeout_established", "tcp_timeout_close_wait")
    return [int((proc_sys / f"{CONNTRACK}{name}").read_text()) for name in names]


def test_a_table_grows_but_never_shrinks_and_timeouts_go_either_way(proc_sys: Path) -> None:
    sysctls.apply(desired_sysctls(NetfilterSettings(), 2))
    assert values(proc_sys) == [131072, 65536, 86400, 3600]
    sysctls.apply(desired_sysctls(NetfilterSettings(min_entries=1000, max_per_core=1), 2))
    assert values(proc_sys) == [131072, 65536, 86400, 3600]


def test_a_correct_setting_is_not_written(proc_sys: Path) -> None:
    sysctls.apply(desired_sysctls(NetfilterSettings(), 2))
    for path in (proc_sys / CONNTRACK).parent.iterdir():
        os.utime(path, (0, 0))
    sysctls.apply(desired_sysctls(NetfilterSettings(), 2))
    assert {path.stat().st_mtime for path in (proc_sys / CONNTRACK).parent.iterdir()} == {0}


def test_each_failed_setting_is_logged_and_the_others_are_set(
    proc_sys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = proc_sys / f"{CONNTRACK}max"
    write = Path.write_text

    def write_text(path: Path, text: str) -> int:
        if path == size:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    (proc_sys / f"{CONNTRACK}buckets").unlink()
    sysctls.apply(desired_sysctls(NetfilterSettings(), 2))
    warnings = [record.__dict__["values"] for record in caplog.records if record.levelname == "WARNING"]
    assert [(each["file"], each["value"], each["errno"]) for each in warnings] == [
        (str(size), 131072, "EACCES"),
        (f"{proc_sys}/{CONNTRACK}buckets", 32768, "ENOENT"),
    ]
    assert "initial network namespace" in warnings[0]["hint"]
    assert size.read_text() == "65536\n"
    assert (proc_sys / f"{CONNTRACK}tcp_timeout_established").read_text() == "86400"


@given(st.sets(st.integers(0, 200), min_size=1))
def test_cpus_are_counted_from_the_kernels_list(cpus: set[int]) -> None:
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1] = [ranges[-1][0], cpu]
        else:
            ranges.append([cpu])
    assert count_cpus(",".join("-".join(map(str, each)) for each in ranges) + "\n") == len(cpus)


def test_without_the_kernels_list_pythons_number_of_cpus_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = tmp_path / "online"
    monkeypatch.setattr(sysctls, "ONLINE_CPUS", online)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert sysctls.online_cpus() == 3
    online.write_text("0-63\n")
    assert sysctls.online_cpus() == 64
    online.write_text("\n")
    assert sysctls.online_cpus() == 3
