"""What mode ipvs asks of the kernel before it serves, and what it sets up."""

import subprocess
import sys

import pytest

from ebpfproxy.backends.ipvs import probes
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.settings import IpvsSettings
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.ipvs import ipvs
from tests.kernel.ipvs_backend.testbed import ONE, bring, plan, run

pytestmark = pytest.mark.kernel


@pytest.mark.usefixtures("_node")
def test_a_scheduler_that_the_kernel_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(Unsupported, match=r"no scheduler best for IPVS; it has .*rr"):
        IpvsBackend(IpvsSettings("best")).open()


@pytest.mark.usefixtures("_node")
def test_a_scheduler_whose_name_no_kernel_takes_is_refused_alike() -> None:
    with pytest.raises(Unsupported, match=r"no scheduler weighted-round-robin for IPVS; it has .*rr"):
        IpvsBackend(IpvsSettings("weighted-round-robin")).open()


@pytest.mark.usefixtures("_node")
def test_timeouts_that_the_kernel_refuses_are_warned_of_and_the_others_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run(IpvsSettings(tcp_timeout=2**31 - 1)) as plane:
        bring(plane, plan(ONE))
    (warning,) = [record.__dict__["values"] for record in caplog.records if record.levelname == "WARNING"]
    assert warning["reason"] == "timeouts of IPVS: Invalid argument"


@pytest.mark.usefixtures("_node")
def test_the_kernel_is_set_up_as_it_has_to_be() -> None:
    with run(IpvsSettings(strict_arp=True, tcp_timeout=100, udp_timeout=7)):
        assert sysctl.read("net/ipv4/vs/conntrack") == "1"
        assert sysctl.read("net/ipv4/vs/expire_nodest_conn") == "1"
        assert sysctl.read("net/ipv4/ip_forward") == "1"
        assert sysctl.read("net/ipv4/conf/all/arp_ignore") == "1"
        assert sysctl.read("net/ipv4/conf/all/arp_announce") == "2"
        assert (ipvs.timeouts().tcp, ipvs.timeouts().udp) == (100, 7)


@pytest.mark.usefixtures("_node")
def test_a_kernel_with_ipvs_has_all_that_is_tried() -> None:
    assert [str(finding) for finding in probes.probe() if not finding.present] == []


_LACKING = """
from ebpfproxy.backends.ipvs import probes
for finding in probes.probe():
    if not finding.present:
        print(finding.missing, finding.remedy, sep=": ")
"""


@pytest.mark.usefixtures("_node")
def test_where_proc_sys_is_read_only_the_probes_say_so() -> None:
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
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sysctl net/ipv4/vs/conntrack is not 1" in said
    assert "make /proc/sys writable" in said
