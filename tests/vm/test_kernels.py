"""The kernel level on each kernel of the table, part by part: each test here is one VM."""

from pathlib import Path

import pytest

from tests.vm.kernels import Kernel
from tests.vm.level import Selection, answer_of, assert_passes

pytestmark = [pytest.mark.vm, pytest.mark.timeout(0)]  # a VM has a time limit of its own

_KERNEL = "tests/kernel/"
_MODULES = ("ip_vs", "dummy", "sctp", "ip_set")
"""What the mode ipvs and SCTP take; where a kernel has them not, their tests are skipped, which fails."""


def _part(*names: str, hours: float = 1.0) -> Selection:
    return Selection([_KERNEL + name for name in names] + ["--packets=2000"], _MODULES, hours * 3600)


PARTS = {
    "probes": _part("test_ebpf_probes.py", "test_features.py", "test_iptables_tools.py"),
    "bpf": _part("test_bpf_map.py", "test_bpf_cgroup.py", "test_bpf_compiler.py", "test_sockets.py"),
    "links": _part("test_tc.py", "test_links.py", "test_local_addresses.py", "test_dummy.py"),
    "connect": _part("test_socket_connect.py", "test_socket_datagrams.py", "test_socket_binds.py", hours=2),
    "affinity": _part("test_socket_affinity.py", "test_socket_changes.py", "test_socket_stale.py", hours=2),
    "policies": _part("test_socket_policies.py", "test_socket_external.py", hours=2),
    "node-ports": _part("test_socket_node_ports.py", "test_socket_lb.py", hours=2),
    "packet-path": _part("packet_path"),
    "packet-clients": _part("test_packet_clients.py", "test_packet_changes.py", hours=2),
    "packet-sizes": _part("test_packet_sizes.py", "test_packet_regressions.py", hours=2),
    "netfilter": _part("test_iptables_traffic.py", "test_nftables_traffic.py"),
    "ipvs": _part("test_ipvs.py", "test_ipvs_rules.py", "test_ipvs_dataplane.py"),
}
"""What of the kernel level is run on every kernel. A module beside this one may have parts of its own."""


@pytest.mark.parametrize("part", PARTS)
def test_the_kernel_level_passes(kernel: Kernel, part: str, tmp_path: Path) -> None:
    assert_passes(kernel, PARTS[part], tmp_path)


@pytest.mark.quick
def test_programs_and_sockets_work_on_an_older_kernel(kernel: Kernel, tmp_path: Path) -> None:
    """What `make test` has time for: a first start of the agent, whose programs the kernel has to take."""
    files = [_KERNEL + name for name in ("test_features.py", "test_socket_connect.py")]
    assert_passes(kernel, Selection([*files, "-k", "features or ebpf"], seconds=900), tmp_path)


def test_every_program_is_loaded_well_below_the_verifiers_limit(kernel: Kernel, tmp_path: Path) -> None:
    """Below half of the million, so that a later kernel that looks at more ways does not refuse at once."""
    found = answer_of(kernel, "tests.vm.programs", tmp_path)
    assert {cost["name"]: cost["refusal"] for cost in found if cost["refusal"]} == {}
    assert {cost["name"]: cost["verified"] for cost in found if cost["verified"] > 500_000} == {}


def test_the_probes_find_what_the_kernel_lacks(kernel: Kernel, tmp_path: Path) -> None:
    found = answer_of(kernel, "tests.vm.features", tmp_path)
    assert found["mode"] == "ebpf"
    assert found["missing"]["ebpf"] == kernel.lacks
