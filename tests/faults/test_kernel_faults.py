"""In each mode, calls into the kernel fail and processes are killed, while clients connect to a Service.

Afterwards the kernel has the desired state, and no connection to a healthy endpoint failed. In mode userspace
connections end with the process: it has clients only after each state.
"""

import time
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.selection import MODES
from ebpfproxy.lab import Lab
from tests.faults.clusters import Exposed, exposures
from tests.faults.testbed import FaultyNode, summary
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

SUBJECTS = {
    "ebpf": ("ebpf", {}),
    "nftables": ("nftables", {}),
    "iptables-legacy": ("iptables", {"iptables_backend": "legacy"}),
    "iptables-nft": ("iptables", {"iptables_backend": "nft"}),
    "ipvs": ("ipvs", {"iptables_backend": "legacy"}),
    "userspace": ("userspace", {"userspace_relays": "2"}),
}
"""A mode, and its configuration."""
HOUR = 3600.0
_EXPOSURES = 300


@pytest.fixture(scope="module")
def pool() -> list[Exposed]:
    return exposures(1, _EXPOSURES)


@pytest.fixture
def testbed(
    request: pytest.FixtureRequest, pool: list[Exposed], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyNode]:
    name: str = request.param
    skip_without_ipvs(name)
    wanted, texts = SUBJECTS[name]
    mode = next(mode for mode in MODES if mode.name == wanted)
    seed = f"{request.config.getoption('faults_seed')}/{name}"
    with Lab(f"faults-{name}", 150 + list(SUBJECTS).index(name)) as lab:
        # A separate lock: other tests run at the same time.
        monkeypatch.setenv("XTABLES_LOCKFILE", str(lab.folder / "xtables.lock"))
        with FaultyNode(lab, mode, texts, seed, pool) as created:
            yield created


@pytest.mark.parametrize(
    "testbed",
    # One tool of iptables differs only in the calls that fail.
    [pytest.param(each, marks=pytest.mark.long if each == "iptables-nft" else ()) for each in SUBJECTS],
    indirect=True,
)
def test_after_faults_and_kills_the_kernel_has_the_desired_state_and_no_connection_failed(
    testbed: FaultyNode, pytestconfig: pytest.Config
) -> None:
    faults, kills = pytestconfig.getoption("faults"), pytestconfig.getoption("kills")
    seconds = pytestconfig.getoption("faults_seconds")
    testbed.run(faults, kills, time.monotonic() + seconds)
    reports = testbed.end_connections()
    attempts = sum(report["attempts"] for report in reports.values())
    slow = sum(report["slow"] for report in reports.values())
    print(
        f"\nseed {pytestconfig.getoption('faults_seed')!r}: {testbed.faults.total()} faults of "
        f"{len(testbed.faults)} calls, {testbed.kills.total()} kills, {testbed.steps} states, "
        f"{attempts} connections, {slow} slow"
    )
    errors = {name: report["errors"] for name, report in reports.items() if report["failed"]}
    assert not testbed.findings, "\n".join(["", *summary(testbed.findings), str(errors)])
    assert not errors
    assert testbed.faults.total() >= faults or seconds < HOUR
    assert testbed.kills.total() >= kills or seconds < HOUR
