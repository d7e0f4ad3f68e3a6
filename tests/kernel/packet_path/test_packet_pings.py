"""Pings of frontend addresses are answered only by a node that serves the client."""

import sys
from collections.abc import Mapping

import pytest
from scapy.layers.l2 import Ether

from ebpfproxy.model.service import TrafficPolicy
from tests.kernel.packet_path.served import families, serve
from tests.support.packet_path import DEVICES, MARK_DONE, REDIRECT, UNSPEC, Outcome, PacketPath
from tests.support.packets import V4, Places, ping

pytestmark = pytest.mark.kernel

FRONTENDS = ("cluster", "external", "balancer")
ANOTHER = "02:00:00:00:00:99"
"""An Ethernet address that no device has."""

Answers = dict[str, set[str]]


def _is_answered(outcome: Outcome, request: bytes) -> bool:
    if outcome.verdict == REDIRECT:
        return True
    assert outcome == (UNSPEC, request, 0)
    return False


def _answers(path: PacketPath, at: Places) -> Answers:
    """By kind of client: the frontends whose address answers its ping. `bypassing` is a pod whose device has
    no program, so that programs see its packets only at egress."""
    found: Answers = {name: set() for name in ("outside", "tunnel", "pod", "bypassing", "node")}
    for name in FRONTENDS:
        address = getattr(at, name)
        for client, source, device in (
            ("outside", at.client, "net"),
            ("tunnel", at.there, "tunnel"),
            ("pod", at.pod, "pod"),
        ):
            request = ping(source, address)
            if _is_answered(path.ingress(request, device), bytes(request)):
                found[client].add(name)
            else:  # the egress of a forwarded packet has the same result
                forwarded = path.egress(request, "net" if device != "net" else "tunnel", came_in=device)
                assert not _is_answered(forwarded, bytes(request)), f"{client} at egress, {name}"
        request = ping(at.node, address)
        if _is_answered(path.egress(request, "net", came_in=""), bytes(request)):
            found["node"].add(name)
        request = ping(at.pod, address)
        path.maps["devices"].delete(path.indices["pod"].to_bytes(4, sys.byteorder))
        if _is_answered(path.egress(request, "net", came_in="pod"), bytes(request)):
            found["bypassing"].add(name)
        path.set_device("pod", DEVICES["pod"].v4, DEVICES["pod"].v6)
    return found


def _by_class(inside: set[str], outside: set[str]) -> Mapping[str, set[str]]:
    return {"outside": outside, "tunnel": outside, "pod": inside, "bypassing": inside, "node": inside}


EVERY = set(FRONTENDS)


@families
def test_policy_cluster_answers_every_client(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    assert _answers(path, at) == _by_class(EVERY, EVERY)


@families
def test_policy_local_answers_external_clients_only_with_a_local_endpoint(
    path: PacketPath, at: Places
) -> None:
    """The endpoint leaves the node and returns."""
    for endpoints, outside in (
        ([at.there], {"cluster"}),
        ([at.here, at.there], EVERY),
        ([at.there], {"cluster"}),
    ):
        serve(path, at, *endpoints, external_policy=TrafficPolicy.LOCAL)
        assert _answers(path, at) == _by_class(EVERY, outside)


@families
def test_internal_policy_local_applies_only_to_the_cluster_ip(path: PacketPath, at: Places) -> None:
    external = {"external", "balancer"}
    serve(path, at, at.there, internal_policy=TrafficPolicy.LOCAL)
    assert _answers(path, at) == _by_class(external, external)
    serve(path, at, at.here, internal_policy=TrafficPolicy.LOCAL)
    assert _answers(path, at) == _by_class(EVERY, EVERY)


@families
def test_a_service_that_rejects_connections_answers_pings(path: PacketPath, at: Places) -> None:
    """Without any endpoints each node answers, with every policy."""
    serve(path, at, external_policy=TrafficPolicy.LOCAL)
    assert _answers(path, at) == _by_class(EVERY, EVERY)


@pytest.mark.parametrize("at", [V4], ids=["v4"])
def test_source_ranges_do_not_restrict_pings(path: PacketPath, at: Places) -> None:
    """Source ranges apply to ports: kube-proxy's IPVS mode answers these pings, too."""
    serve(path, at, at.there, ranges=["203.0.113.0/24"])
    assert _answers(path, at) == _by_class(EVERY, EVERY)


@families
def test_a_ping_for_another_host_is_not_answered(path: PacketPath, at: Places) -> None:
    """PACKET_OTHERHOST: at a device in promiscuous mode, and for frames that a bridge forwards. At a pod's
    bridge port the bridge itself is another host: a ping for the bridge is answered."""
    serve(path, at, at.there)
    request = ping(at.client, at.balancer)
    request[Ether].dst = ANOTHER
    assert path.ingress(request, "net") == (UNSPEC, bytes(request), 0)
    assert path.egress(request, "net", came_in="pod") == (UNSPEC, bytes(request), 0)
    assert path.egress(request, "pod", came_in="net") == (UNSPEC, bytes(request), 0)
    assert path.ingress(request, "pod") == (UNSPEC, bytes(request), 0)
    path.set_device("pod", bridge=ANOTHER)
    outcome = path.ingress(request, "pod")
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    assert path.counted() == {"echo_answered": 1}


@families
def test_an_address_in_a_network_of_machines_is_answered_only_if_it_is_a_cluster_ip(
    path: PacketPath, at: Places
) -> None:
    """A more specific network, of the node itself, has no effect on other addresses."""
    serve(path, at, at.there)
    network = f"{at.balancer}/{'24' if at is V4 else '112'}"
    path.set_foreign(network)
    path.set_foreign(f"{at.cluster}/{'24' if at is V4 else '112'}")
    assert _answers(path, at) == _by_class({"cluster"}, {"cluster"})


@families
def test_a_guest_that_shares_a_device_with_the_node_gets_no_answer(path: PacketPath, at: Places) -> None:
    """No stack of the node has sent the packet, and its source is no address of the node."""
    serve(path, at, at.there)
    guest = "192.0.2.77" if at is V4 else "2001:db8::77"
    request = ping(guest, at.balancer)
    assert path.egress(request, "net", came_in="") == (UNSPEC, bytes(request), 0)
    assert _is_answered(path.egress(ping(at.node, at.balancer), "net", came_in=""), b"")
