"""The targets of each path, and the node of their endpoints."""

import ipaddress
from itertools import combinations

import pytest

from ebpfproxy.bench import crossing


def test_networks_do_not_overlap() -> None:
    networks = [*crossing._SERVED.values(), *crossing._DIRECT.values(), crossing._STRAIGHT]
    for one, other in combinations(map(ipaddress.ip_network, networks), 2):
        assert not one.overlaps(other)


@pytest.mark.parametrize("services", [2, 3, 10_000])
def test_every_service_is_local_or_remote(services: int) -> None:
    ports = {
        path: {port for _, port in crossing.targets_of(path, "172.18.1.2", services, 10)}
        for path in ("nodeport-local", "nodeport-remote")
    }
    assert not ports["nodeport-local"] & ports["nodeport-remote"]
    assert len(ports["nodeport-local"] | ports["nodeport-remote"]) == services


def test_direct_paths_have_as_many_targets_as_endpoints_so_that_caches_are_equally_cold() -> None:
    for which in (crossing.LOCAL, crossing.REMOTE):
        targets = set(crossing.targets_of(f"direct-{which}", "172.18.1.2", 1000, 10))
        network = ipaddress.ip_network(crossing._DIRECT[which])
        assert len(targets) == 5000
        assert all(ipaddress.ip_address(address) in network for address, _ in targets)
