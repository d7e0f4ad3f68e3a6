"""Detection of the IP families that a node uses."""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.netfilter.node_support import families_used
from ebpfproxy.config import Config
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, parse_network
from tests.kernel.cluster import eventually

pytestmark = pytest.mark.kernel

V4, V6 = Family.IPV4, Family.IPV6


@pytest.fixture(autouse=True)
def _nowhere() -> Iterator[None]:
    with netns.throw_away():
        netns.set_loopback_up()
        yield


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=60)


def used() -> set[Family]:
    return set(families_used(Config(hostname_override="here")))


def test_global_addresses_count_and_link_local_ones_do_not() -> None:
    assert used() == set(), "loopback addresses do not count"
    ip("link add node type veth peer name other")
    for device in ("node", "other"):
        ip(f"link set {device} up")
    ip("addr add fe80::1/64 dev node nodad")
    ip("addr add 169.254.1.1/16 dev node")
    assert used() == set()
    ip("addr add 192.0.2.1/24 dev node")
    assert used() == {V4}
    ip("addr add 2001:db8::1/64 dev node nodad")
    # The kernel adds the local route in a work item, also without DAD (addrconf_dad_work()).
    eventually(lambda: used() == {V4, V6}, "a global IPv6 address counts")


def test_pod_networks_count() -> None:
    config = Config(hostname_override="here", cluster_cidr=(parse_network("fd00:10:244::/56"),))
    assert families_used(config) == {V6}
