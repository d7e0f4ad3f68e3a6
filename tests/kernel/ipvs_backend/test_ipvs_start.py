"""What mode ipvs needs from the kernel, and the sysctls and timeouts that it sets."""

import subprocess
import sys

import pytest

from ebpfproxy.backends.ipvs import prerequisites
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.ipvs import ipvs
from tests.kernel.ipvs_backend.testbed import ONE, bring, plan, run

pytestmark = pytest.mark.kernel


@pytest.mark.usefixtures("_node")
def test_a_missing_scheduler_is_rejected_with_the_available_ones() -> None:
    with pytest.raises(Unsupported, match=r"no scheduler best for IPVS; it has .*rr"):
        IpvsBackend(IpvsSettings("best")).open()


@pytest.mark.usefixtures("_node")
def test_an_invalid_scheduler_name_is_rejected_with_the_available_ones() -> None:
    with pytest.raises(Unsupported, match=r"no scheduler weighted-round-robin for IPVS; it has .*rr"):
        IpvsBackend(IpvsSettings("weighted-round-robin")).open()


@pytest.mark.usefixtures("_node")
def test_rejected_timeouts_cause_a_warning_and_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run(IpvsSettings(tcp_timeout=2**31 - 1)) as plane:
        bring(plane, plan(ONE))
    (warning,) = [record.__dict__["values"] for record in caplog.records if record.levelname == "WARNING"]
    assert warning["reason"] == "cannot set timeouts of IPVS: Invalid argument"


@pytest.mark.usefixtures("_node")
def test_sysctls_and_timeouts_are_set() -> None:
    with run(IpvsSettings(strict_arp=True, tcp_timeout=100, udp_timeout=7)):
        assert sysctl.read("net/ipv4/vs/conntrack") == "1"
        assert sysctl.read("net/ipv4/vs/expire_nodest_conn") == "1"
        assert sysctl.read("net/ipv4/ip_forward") == "1"
        assert sysctl.read("net/ipv4/conf/all/arp_ignore") == "1"
        assert sysctl.read("net/ipv4/conf/all/arp_announce") == "2"
        assert (ipvs.timeouts().tcp, ipvs.timeouts().udp) == (100, 7)


@pytest.mark.usefixtures("_node")
def test_a_kernel_with_ipvs_passes_all_probes() -> None:
    assert [str(finding) for finding in prerequisites.probe() if not finding.present] == []


_LACKING = """
from ebpfproxy.backends.ipvs import prerequisites
for finding in prerequisites.probe():
    if not finding.present:
        print(finding.missing, finding.remedy, sep=": ")
"""


@pytest.mark.usefixtures("_node")
def test_a_read_only_proc_sys_is_reported_by_the_probes() -> None:
    """As in a container that is not privileged."""
    readonly = "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys"
    command = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        f'{readonly}; exec "$@"',
        "-",
        sys.executable,
        "-c",
        _LACKING,
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sysctl net/ipv4/vs/conntrack is not 1" in printed
    assert "make /proc/sys writable" in printed
