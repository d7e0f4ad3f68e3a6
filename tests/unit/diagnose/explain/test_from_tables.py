"""The situation that rows of the maps describe."""

import dataclasses
from collections.abc import Sequence

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.view import EndpointRow, NetworkRow, RangeRow, ServiceRow, SettingRow
from ebpfproxy.diagnose.explain.from_tables import situation_of
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import Verdict
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import parse_address
from ebpfproxy.plan.service_plan import SocketLb
from tests.unit.diagnose.explain.scene import A_CLIENT, A_POD, CLUSTER_IP, NODE, explained, reasons, to

REMOTE, HERE = "10.1.9.1:8080", "10.1.0.8:8080"
WEB = ServiceRow(
    "default/web:http",
    "ClusterIP",
    "TCP",
    CLUSTER_IP,
    80,
    [HERE, REMOTE],
    [HERE],
    "Cluster/Local",
    600,
    ["masquerade-node", "masquerade-outside"],
    1,
    "0+2",
    "2+1",
)
NODE_PORT = WEB._replace(kind="NodePort", address="*", port=30080)
BALANCER = WEB._replace(kind="LoadBalancer", address="203.0.113.1", flags=["source-ranges"])
ENDPOINTS = (
    EndpointRow("default/web:http", "TCP", "10.1.0.8", 8080, ["cluster", "local"], True, 1, 1),
    EndpointRow("default/web:http", "TCP", "10.1.9.1", 8080, ["cluster"], False, 2, 1),
)
UPLINK = DeviceRow("eth0", 2, "net", "ethernet", [NODE], 5, 6, "none", [])
LOOPBACK = DeviceRow("lo", 1, "net", "ethernet", [], 0, 6, "none", [])


@dataclasses.dataclass
class Rows:
    """The sections that the situation needs."""

    rows: Sequence[ServiceRow] = (WEB, NODE_PORT, BALANCER)
    of_devices: Sequence[DeviceRow] = (UPLINK,)
    of_endpoints: Sequence[EndpointRow] = ENDPOINTS
    flags: int = abi.NODE_SOCKETS_OF_PODS

    def services(self) -> Sequence[ServiceRow]:
        return self.rows

    def endpoints(self) -> Sequence[EndpointRow]:
        return self.of_endpoints

    def ranges(self) -> Sequence[RangeRow]:
        return (RangeRow("default/web:http", "198.51.100.0/24", 1),)

    def networks(self) -> Sequence[NetworkRow]:
        return (NetworkRow(f"{NODE}/32", True, True), NetworkRow("127.0.0.0/8", True, False))

    def devices(self) -> Sequence[DeviceRow]:
        return self.of_devices

    def settings(self) -> Sequence[SettingRow]:
        return (SettingRow("flags", self.flags),)


def test_slow_start_and_tunnels_are_those_of_the_plan() -> None:
    """`verify --from-dump` named each such Service as different."""
    (plan,) = of(Rows((WEB._replace(slow_start=30),))).plans.values()
    assert (plan.balancing.slow_start, plan.balancing.tunnels) == (30, ())
    here, remote = (ENDPOINTS[0]._replace(tunnel="here"), ENDPOINTS[1]._replace(tunnel="192.0.2.11"))
    (plan,) = of(Rows((WEB,), of_endpoints=(remote, here))).plans.values()
    assert plan.balancing.tunnels == (None, parse_address("192.0.2.11"))


def of(rows: Rows) -> Situation:
    return situation_of(rows, "worker-1")  # type: ignore[arg-type]


def used(situation: Situation, origin_is_pod: bool = True) -> list[str]:
    found = explained(situation, origin=A_POD if origin_is_pod else A_CLIENT)
    return [str(each) for each in found.endpoints if each.used]


def test_each_class_of_clients_has_its_list() -> None:
    situation = of(Rows())
    assert used(situation) == [HERE, REMOTE]
    assert used(situation, origin_is_pod=False) == [HERE]
    outside = explained(situation, origin=A_CLIENT)
    assert {each.reason for each in outside.endpoints} == {Reason.LISTED, Reason.NOT_LISTED}
    assert outside.service == "default/web:http"


def test_node_ports_are_served_at_the_networks_with_the_flag() -> None:
    situation = of(Rows())
    assert explained(situation, to(NODE, 30080), A_CLIENT).verdict is Verdict.CONNECTS
    assert explained(situation, to("192.0.2.99", 30080), A_CLIENT).verdict is Verdict.ROUTED


def test_source_ranges_apply() -> None:
    situation = of(Rows())
    assert explained(situation, to("203.0.113.1"), A_CLIENT).verdict is Verdict.CONNECTS
    assert explained(situation, to("203.0.113.1"), A_POD).verdict is Verdict.DROPPED


def test_the_flag_of_a_frontend_decides_without_endpoints() -> None:
    empty = WEB._replace(id=2, internal=[], external=[])
    rejected = of(Rows([empty._replace(flags=["reject"])]))
    assert explained(rejected, origin=A_POD).verdict is Verdict.REJECTED
    assert explained(of(Rows([empty])), origin=A_POD).verdict is Verdict.DROPPED


def test_an_outside_client_is_masqueraded_with_the_address_of_the_device() -> None:
    cluster = WEB._replace(policy="Cluster", external=[HERE, REMOTE])
    found = explained(of(Rows([cluster])), origin=A_CLIENT)
    seen = {str(each): each.seen for each in found.endpoints}
    assert seen == {HERE: A_CLIENT.addresses, REMOTE: (parse_address(NODE),)}
    assert Reason.POLICY_MASQUERADES in reasons(found)


def test_the_socket_load_balancer_shows_in_settings_and_devices() -> None:
    assert of(Rows()).context.socket_lb is SocketLb.ON
    assert of(Rows(flags=0)).context.socket_lb is SocketLb.HOST
    assert of(Rows(flags=0, of_devices=(LOOPBACK, UPLINK))).context.socket_lb is SocketLb.OFF


def test_an_unknown_kind_is_left_out_and_empty_maps_are_an_empty_situation() -> None:
    assert explained(of(Rows([WEB._replace(kind="9")]))).verdict is Verdict.ROUTED
    assert not of(Rows([])).plans
