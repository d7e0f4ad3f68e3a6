"""The kernel level on each kernel of the table, part by part: each test here is one VM."""

from pathlib import Path

import pytest

from tests.vm.kernels import Kernel
from tests.vm.level import Selection, answer_of, assert_passes

pytestmark = [pytest.mark.vm, pytest.mark.timeout(0)]  # a VM has a time limit of its own

PARTS = {
    "probes": Selection(
        (
            "tests/kernel/test_ebpf_probes.py",
            "tests/kernel/test_features.py",
            "tests/kernel/test_iptables_tools.py",
        )
    ),
    "bpf": Selection(
        (
            *("tests/kernel/test_bpf_map.py", "tests/kernel/test_bpf_cgroup.py", "tests/kernel/test_tc.py"),
            *("tests/kernel/test_bpf_compiler.py", "tests/kernel/test_sockets.py"),
        )
    ),
    "sockets": Selection(
        (
            *("tests/kernel/test_socket_connect.py", "tests/kernel/test_socket_datagrams.py"),
            *("tests/kernel/test_socket_policies.py", "tests/kernel/test_socket_affinity.py"),
            *("tests/kernel/test_socket_node_ports.py", "tests/kernel/test_socket_external.py"),
            *("tests/kernel/test_socket_binds.py", "tests/kernel/test_socket_changes.py"),
            *("tests/kernel/test_socket_lb.py", "tests/kernel/test_socket_stale.py"),
        ),
        seconds=7200,
    ),
    "packet-path": Selection(("tests/kernel/packet_path", "--packets=2000"), seconds=3600),
    "packets": Selection(
        (
            *("tests/kernel/test_packet_clients.py", "tests/kernel/test_packet_changes.py"),
            *("tests/kernel/test_packet_sizes.py", "tests/kernel/test_packet_regressions.py"),
        ),
        seconds=7200,
    ),
    "netfilter": Selection(
        ("tests/kernel/test_iptables_traffic.py", "tests/kernel/test_nftables_traffic.py"), seconds=3600
    ),
}
"""What of the kernel level is run on every kernel. A module beside this one may have parts of its own."""


@pytest.mark.parametrize("part", PARTS)
def test_the_kernel_level_passes(kernel: Kernel, part: str, tmp_path: Path) -> None:
    assert_passes(kernel, PARTS[part], tmp_path)


@pytest.mark.quick
def test_programs_and_sockets_work_on_an_older_kernel(kernel: Kernel, tmp_path: Path) -> None:
    """What `make test` has time for: a first start of the agent, whose programs the kernel has to take."""
    chosen = (
        "tests/kernel/test_features.py",
        "tests/kernel/test_socket_connect.py",
        "-k",
        "features or ebpf",
    )
    assert_passes(kernel, Selection(chosen, seconds=600), tmp_path)


def test_every_program_is_loaded_well_below_the_verifiers_limit(kernel: Kernel, tmp_path: Path) -> None:
    """Below half of the million, so that a later kernel that looks at more ways does not refuse at once."""
    found = answer_of(kernel, "tests.vm.programs", tmp_path)
    assert {cost["name"]: cost["refusal"] for cost in found if cost["refusal"]} == {}
    assert {cost["name"]: cost["verified"] for cost in found if cost["verified"] > 500_000} == {}


def test_the_probes_find_what_the_kernel_lacks(kernel: Kernel, tmp_path: Path) -> None:
    found = answer_of(kernel, "tests.vm.features", tmp_path)
    assert found["mode"] == "ebpf"
    assert found["missing"]["ebpf"] == kernel.lacks
