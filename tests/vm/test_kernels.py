"""The kernel tests on each kernel of the table, in parts: each test is one VM."""

from pathlib import Path

import pytest

from tests.vm.kernels import Kernel
from tests.vm.level import Selection, answer_of, assert_passes

pytestmark = [pytest.mark.vm, pytest.mark.timeout(0)]  # a VM has its own time limit

_KERNEL = "tests/kernel/"
_MODULES = ("ip_vs", "dummy", "sctp", "ip_set", "geneve")
"""Modules for mode ipvs, SCTP and direct server return. On a kernel without them their tests are skipped,
which counts as a failure."""


def _part(*names: str, only: str = "", subjects: str = "", hours: float = 1.0) -> Selection:
    """`only`: the value of pytest's -k. `subjects`: the subjects of the differential test."""
    options = ["--packets=20000", "--connects=500", "--flood=20000", "--udp-sockets=200"]
    options += ["-k", only] if only else []
    options += [f"--subjects={subjects}"] if subjects else []
    return Selection([_KERNEL + name for name in names] + options, _MODULES, hours * 3600)


_IPTABLES = ("rules", "removal", "rejections", "drift", "edits", "open")
_AGENTS = ("test_agent_disturbed.py", "test_agent_restarts.py", "test_agent_health_checks.py")
PARTS = {
    "probes": _part(
        "test_ebpf_probes.py", "test_features.py", "test_netns_cookie.py", "test_iptables_tools.py"
    ),
    "bpf": _part(
        "test_bpf_map.py",
        "test_bpf_cgroup.py",
        "test_bpf_compiler.py",
        "test_program_costs.py",
        "test_sockets.py",
    ),
    "links": _part(
        "test_tc.py", "test_links.py", "test_local_addresses.py", "test_dummy.py", "test_geneve.py"
    ),
    "direct-server-return": _part("test_dsr.py", "test_agent_dsr.py", hours=2),
    "direct-server-return-bench": _part("test_benches.py", only="direct_server_return"),
    "connect": _part("test_socket_connect.py", "test_socket_datagrams.py", "test_socket_binds.py", hours=2),
    "affinity": _part("test_socket_changes.py", "test_socket_stale.py", hours=2),
    "udp-sockets": _part("test_socket_crowd.py", "test_foreign_sockets.py"),
    "services": _part("test_socket_scenarios.py", "test_socket_lb.py", hours=2),
    "order": _part("test_tcx.py", "test_agent_first.py"),
    "doctor": _part("test_doctor_node.py"),
    "floods": _part("floods", hours=3),
    "packet-path": _part("packet_path"),
    "packet-table": _part("test_packet_table.py", hours=2),
    "packet-clients": _part("test_packet_scenarios.py", "test_packet_changes.py", hours=2),
    "removed-endpoints": _part("test_removed_endpoints.py", hours=2),
    "sctp": _part("test_sctp.py", hours=2),
    "packet-sizes": _part("test_packet_sizes.py", hours=2),
    "maps": _part(
        "service_table",
        "device_table",
        "test_map_migration.py",
        "test_map_pins.py",
        "test_ebpf_generation.py",
        hours=2,
    ),
    "flows": _part(
        "test_flow_collector.py",
        "test_ebpf_drain.py",
        "test_reinjection.py",
        "test_conntrack.py",
        "test_netfilter_flows.py",
        "test_stale_conntrack.py",
        "test_tracked_connections.py",
        "test_packet_path_view.py",
        "test_view.py",
        hours=2,
    ),
    "netfilter": _part("test_iptables_traffic.py", "test_nftables_traffic.py"),
    "flowtable": _part("test_flowtable.py", "nftables_table/test_flowtable.py", hours=2),
    "nftables": _part("nftables_table", "test_nftables_objects.py", hours=2),
    "iptables": _part(*(f"test_iptables_{name}.py" for name in _IPTABLES), hours=2),
    "ipvs": _part(
        "test_ipvs.py", "test_ipset.py", "test_ipvs_rules.py", "test_ipvs_shown.py", "ipvs_backend"
    ),
    "ipvs-forwarding": _part("test_ipvs_forwarding.py", "test_ipvs_untranslated.py"),
    "ipvs-agents": _part(*_AGENTS, only="ipvs", hours=2),
    "ipvs-differential": _part("differential", subjects="ipvs"),
    "ipvs-takeover": _part("test_agent_takeover.py", only="ipvs", hours=2),
    "masquerades": _part("test_agent_masquerades.py", hours=2),
}
"""The kernel tests that run on every kernel. Other modules in this folder may have more parts."""

_QUICK = (
    *("test_program_costs.py", "test_features.py", "test_ipvs_shown.py", "test_ipvs_rules.py"),
    *("ipvs_backend", "test_socket_connect.py", "test_socket_scenarios.py", "test_packet_scenarios.py"),
)
_WORDS = (
    "costs or features or shown or test_socket_connect and ebpf and node-v6"
    " or each_scenario and (ipvs or test_socket_scenarios and ebpf)"
)
QUICK = [*(_KERNEL + name for name in _QUICK), "-k", _WORDS, "--sync-period=15s"]


@pytest.mark.parametrize("part", PARTS)
def test_the_kernel_tests_pass(kernel: Kernel, part: str, tmp_path: Path) -> None:
    assert_passes(kernel, PARTS[part], tmp_path)


@pytest.mark.quick
def test_programs_and_ipvs_work_on_an_older_kernel(kernel: Kernel, tmp_path: Path) -> None:
    """The selection for `make test` with KVM, and for `make test-all`: the kernel loads all programs, and
    tests that this machine may lack features for. With one CPU less is emulated. The time limit is for
    software emulation beside other tests, where a VM gets less than half of a CPU."""
    assert_passes(kernel, Selection(QUICK, _MODULES, seconds=2400, cpus=1), tmp_path)


def test_the_probes_find_what_the_kernel_lacks(kernel: Kernel, tmp_path: Path) -> None:
    found = answer_of(kernel, "tests.vm.features", tmp_path)
    assert found["mode"] == "ebpf"
    assert found["missing"]["ebpf"] == kernel.lacks
