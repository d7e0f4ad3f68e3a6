"""Which clients with session affinity remain known when endpoints change."""

import re

import pytest

from ebpfproxy.backends.nftables import clients
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE
from ebpfproxy.backends.nftables.names import affinity_number
from ebpfproxy.plan.service_plan import PlannedEndpoint, ServicePortPlan
from tests.contract.test_backend import plan
from tests.kernel.nftables_table.tables import bring, entries, run_nft

pytestmark = pytest.mark.kernel

TWO = plan("web", "10.96.0.1", endpoints=2, affinity=600)
ONE = plan("web", "10.96.0.1", endpoints=1, affinity=600)
OTHER = plan("other", "10.96.0.2", affinity=600)
FIRST, SECOND = TWO.endpoints


def have_client(served: ServicePortPlan, endpoint: PlannedEndpoint, client: str) -> None:
    number = affinity_number(served.name, endpoint.address, endpoint.port)
    run_nft(f"add element ip {TABLE} affinity {{ {client} . {number} timeout 600s }}")


def known() -> set[str]:
    return set(re.findall(r"(192\.0\.2\.\d+) \. \d+ timeout", run_nft(f"list set ip {TABLE} affinity", "-T")))


@pytest.fixture
def with_clients(plane: NftablesBackend) -> NftablesBackend:
    """Clients 1 and 2 of both endpoints of a Service, and 3 of another Service."""
    assert not bring(plane, entries(plane, TWO, OTHER))
    have_client(TWO, FIRST, "192.0.2.1")
    have_client(TWO, SECOND, "192.0.2.2")
    have_client(OTHER, OTHER.endpoints[0], "192.0.2.3")
    return plane


def test_an_endpoint_that_returns_has_no_former_clients(with_clients: NftablesBackend) -> None:
    assert not bring(with_clients, entries(with_clients, ONE, OTHER))
    assert not bring(with_clients, entries(with_clients, TWO, OTHER))
    assert known() == {"192.0.2.1", "192.0.2.3"}


def test_a_service_that_returns_has_no_former_clients(with_clients: NftablesBackend) -> None:
    assert not bring(with_clients, entries(with_clients, OTHER))
    assert not bring(with_clients, entries(with_clients, TWO, OTHER))
    assert known() == {"192.0.2.3"}


def test_an_endpoint_that_returns_after_a_restart_has_no_former_clients(
    with_clients: NftablesBackend,
) -> None:
    assert not bring(with_clients, entries(with_clients, ONE, OTHER))
    restarted = NftablesBackend()
    restarted.open()
    try:
        assert not bring(restarted, entries(restarted, TWO, OTHER))
    finally:
        restarted.close()
    assert known() == {"192.0.2.1", "192.0.2.3"}


def test_after_a_restart_clients_are_known(with_clients: NftablesBackend) -> None:
    restarted = NftablesBackend()
    restarted.open()
    try:
        assert not bring(
            restarted, entries(restarted, plan("web", "10.96.0.1", endpoints=3, affinity=600), OTHER)
        )
    finally:
        restarted.close()
    assert known() == {"192.0.2.1", "192.0.2.2", "192.0.2.3"}


def test_all_clients_of_a_lost_endpoint_are_forgotten(with_clients: NftablesBackend) -> None:
    """There are more than one message can delete."""
    number = affinity_number(TWO.name, SECOND.address, SECOND.port)
    many = ", ".join(f"192.0.2.{n} . {number} timeout 600s" for n in range(4, 254))
    run_nft(f"add element ip {TABLE} affinity {{ {many} }}")
    assert not bring(with_clients, entries(with_clients, ONE, OTHER))
    assert not bring(with_clients, entries(with_clients, TWO, OTHER))
    assert known() == {"192.0.2.1", "192.0.2.3"}


def test_if_too_many_endpoints_were_lost_any_new_one_may_be_one_of_them(
    with_clients: NftablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_MAX_LOST", 1)
    many = plan("many", "10.96.0.4", endpoints=3, affinity=600)
    assert not bring(with_clients, entries(with_clients, many, ONE, OTHER))
    assert not bring(with_clients, entries(with_clients, ONE, OTHER))
    assert not bring(with_clients, entries(with_clients, TWO, OTHER))
    assert known() == {"192.0.2.1", "192.0.2.3"}
