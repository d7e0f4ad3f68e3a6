"""`ebpfproxy dump` of the packet path from real maps: flows, translations, devices, counters, traffic."""

import contextlib
import dataclasses
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from socket import IPPROTO_TCP, IPPROTO_UDP, htons, if_nametoindex
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.counters import Readings
from ebpfproxy.backends.ebpf.inspect.saved import SavedView
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.cli.dump import command
from ebpfproxy.cli.dump_sections import SECTIONS
from ebpfproxy.errors import ConfigError, NotFound
from ebpfproxy.linux.bpf import tc
from ebpfproxy.linux.bpf.bpf import possible_cpus
from ebpfproxy.model.address import format_address, parse_address
from ebpfproxy.model.counters import OTHER, ServiceTraffic
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps, load_program
from tests.support.flows import NS, SERVICE, a_flow, entries, reply_entries, seen, write
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(
    services=8, slots=16, endpoints=64, affinity=8, sockets=8, flows=65536, source_ranges=8, traffic=8
)
SCHED_CLS = 3  # BPF_PROG_TYPE_SCHED_CLS
_U32 = struct.Struct("=I")
_FLOWS = "flows", "replies"


@pytest.fixture(scope="module")
def made() -> Iterator[BpfPlace]:
    with bpf_place() as place:
        folder = build_maps(place, _SIZES, "programs-view")
        Pins(place.bpffs).set_current(folder.parent)
        yield place


@pytest.fixture
def maps(made: BpfPlace) -> Iterator[Maps]:
    """Empty except for the name of the Service of `a_flow`."""
    with contextlib.closing(Maps(made.bpffs / "programs-view" / "maps")) as opened:
        for name in (*_FLOWS, "devices"):
            for key, _ in list(opened[name].items()):
                opened[name].delete(key)
        opened["node"].update(_U32.pack(0), bytes(abi.NODE.size))
        for id_ in range(_SIZES.traffic + 1):
            opened["traffic"].update(_U32.pack(id_), bytes(abi.TRAFFIC.size) * possible_cpus())
        opened["service_names"].update(_U32.pack(SERVICE), abi.SERVICE_NAME.pack(b"default/web:http", 6, 4))
        yield opened


@pytest.fixture
def view(maps: Maps, made: BpfPlace) -> Iterator[View]:
    with contextlib.closing(View(made.bpffs)) as opened:
        yield opened


def ago(seconds: float) -> int:
    return time.monotonic_ns() - int(seconds * NS)


def dump(made: BpfPlace, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, f"--bpffs-root={made.bpffs}"], catch_exceptions=False)


def dumped(made: BpfPlace, *arguments: str) -> Any:
    return json.loads(dump(made, *arguments, "-o", "json").stdout)


def test_a_flow_is_one_row_for_both_entries(maps: Maps, view: View) -> None:
    write(maps, seen(a_flow(1, masquerade="10.0.0.1"), client=ago(100), endpoint=ago(50)))
    (row,) = view.conntrack()
    assert row[:3] == ("default/web:http", "TCP", "192.0.2.9:1001")
    assert row[3:7] == ("10.96.0.1:80", "10.244.1.3:8080", "10.0.0.1:40001", "ESTABLISHED")
    assert row.age == pytest.approx(50, abs=5)
    assert row.left == pytest.approx(86350, abs=5)
    assert row.flags == []


def test_the_timeouts_shown_are_those_that_the_programs_use(maps: Maps, view: View) -> None:
    maps["node"].update(_U32.pack(0), abi.NODE.pack(0, 0, 0, 400, 1, 2, 3, 4, 5, 1000, 50, *[0] * 6))
    write(maps, a_flow(1, last_seen=ago(100)), a_flow(2, IPPROTO_UDP, 0, ago(100)))
    tcp, udp = sorted(view.conntrack(), key=lambda row: row.protocol)
    assert tcp.left == pytest.approx(300, abs=5)
    assert (udp.state, udp.left) == ("UNREPLIED", 0)  # expired, and not collected yet


@pytest.mark.parametrize(
    ("protocol", "flags", "state"),
    [
        (IPPROTO_TCP, 0, "SYN"),
        (IPPROTO_TCP, abi.FLOW_RESET, "FIN"),
        (IPPROTO_UDP, 0, "UNREPLIED"),
        (IPPROTO_UDP, abi.FLOW_REPLIED, "REPLIED"),
    ],
)
def test_half_open_flows_are_shown_until_they_expire(
    maps: Maps, view: View, protocol: int, flags: int, state: str
) -> None:
    """They stay in the maps until the collector removes them."""
    write(
        maps, *(a_flow(n, protocol, flags, ago(s), "10.0.0.1", half_open=True) for n, s in ((1, 20), (2, 70)))
    )
    (row,) = view.conntrack()
    assert (row.client, row.state, row.flags) == ("192.0.2.9:1001", state, [])
    assert row.left == pytest.approx(40 if protocol == IPPROTO_TCP else 10, abs=5)
    assert len(list(view.nat())) == 4
    used = {row.map: row[1:] for row in view.maps()}
    assert used["half_open_flows"] == (1, 8192)
    assert used["flows"] == (0, 65536)


def test_a_flow_without_its_reply_is_shown(maps: Maps, view: View) -> None:
    maps["flows"].update_all(list(entries(a_flow(1, last_seen=ago(50))).items()))
    (row,) = view.conntrack()
    assert row.age == pytest.approx(50, abs=5)


def test_a_reply_entry_of_another_flow_is_not_attributed_to_this_flow(maps: Maps, view: View) -> None:
    """Two flows have the same reply port, and the later one replaced the reply entry."""
    previous = a_flow(1, last_seen=ago(90), masquerade="10.0.0.1")
    write(maps, previous)
    write(maps, seen(previous, ago(7), ago(7))._replace(client_port=htons(1002)))
    rows = {row.client: row.age for row in view.conntrack()}
    assert rows == pytest.approx({"192.0.2.9:1001": 90, "192.0.2.9:1002": 7}, abs=5)


def test_a_masquerade_address_that_is_not_chosen_yet_is_not_shown(maps: Maps, view: View) -> None:
    write(maps, a_flow(1, flags=abi.FLOW_MASQUERADE, last_seen=ago(1), half_open=True))
    (row,) = view.conntrack()
    assert row.masquerade == ""


def test_the_flags_of_a_flow_are_shown(maps: Maps, view: View) -> None:
    write(maps, a_flow(1, flags=abi.FLOW_NODE | abi.FLOW_REDIRECT, masquerade="10.0.0.1"))
    (row,) = view.conntrack()
    assert row.flags == ["node", "redirect"]


def test_ipv6_addresses_have_brackets(maps: Maps, view: View) -> None:
    write(maps, a_flow(1, family=6))
    (row,) = view.conntrack()
    assert row.endpoint == f"[{format_address(parse_address('fd00::10.244.1.3'))}]:8080"


_CLIENT, _FRONTEND, _ENDPOINT = "192.0.2.9:1001", "10.96.0.1:80", "10.244.1.3:8080"


def translations(view: View) -> list[tuple[str, ...]]:
    return sorted(row[2:7] for row in view.nat())


def test_the_translations_of_a_flow_are_shown(maps: Maps, view: View) -> None:
    write(maps, a_flow(1)._replace(reply_port=htons(7777)))
    assert translations(view) == [
        ("egress", _ENDPOINT, "192.0.2.9:7777", _FRONTEND, _CLIENT),
        ("ingress", _CLIENT, _FRONTEND, "192.0.2.9:7777", _ENDPOINT),
    ]


def test_a_masqueraded_flow_that_passes_the_stack_is_translated_in_two_steps(maps: Maps, view: View) -> None:
    write(maps, a_flow(1, masquerade="10.0.0.1"))
    post_dnat, masquerade = "192.0.2.9:40001", "10.0.0.1:40001"
    assert translations(view) == [
        ("egress", _ENDPOINT, post_dnat, _FRONTEND, _CLIENT),
        ("egress", post_dnat, _ENDPOINT, masquerade, _ENDPOINT),
        ("ingress", _ENDPOINT, masquerade, _ENDPOINT, post_dnat),
        ("ingress", _CLIENT, _FRONTEND, post_dnat, _ENDPOINT),
    ]


@pytest.mark.parametrize(
    ("flags", "side"), [(abi.FLOW_NODE, "egress"), (abi.FLOW_REDIRECT, "ingress")], ids=["node", "redirect"]
)
def test_a_masqueraded_flow_past_the_stack_is_translated_in_one_step(
    maps: Maps, view: View, flags: int, side: str
) -> None:
    write(maps, a_flow(1, flags=flags, masquerade="10.0.0.1"))
    assert translations(view) == sorted(
        [
            (side, _CLIENT, _FRONTEND, "10.0.0.1:40001", _ENDPOINT),
            ("ingress", _ENDPOINT, "10.0.0.1:40001", _FRONTEND, _CLIENT),
        ]
    )


def test_a_reply_entry_without_its_flow_shows_an_unknown_masquerade_address(maps: Maps, view: View) -> None:
    flow = a_flow(1, flags=abi.FLOW_NODE, masquerade="10.0.0.1")
    maps["replies"].update_all(list(reply_entries(flow).items()))
    assert list(view.conntrack()) == []
    assert translations(view) == [("ingress", _ENDPOINT, "*:40001", _FRONTEND, _CLIENT)]


def test_rows_are_sorted_by_client_and_frontend(maps: Maps, made: BpfPlace) -> None:
    flows = [a_flow(n)._replace(client=parse_address(f"192.0.2.{n}")) for n in (30, 4, 200)]
    write(maps, *flows)
    for what, column in (("conntrack", "client"), ("nat", "source")):
        shown = [row[column] for row in dumped(made, what) if row[column].startswith("192")]
        assert shown == ["192.0.2.4:1004", "192.0.2.30:1030", "192.0.2.200:1200"]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--service=default/web"], 2),
        (["--service=default/web:http"], 2),
        (["--service=default/db"], 0),
        (["--address=192.0.2.9:1002"], 1),
        (["--address=192.0.2.9"], 2),
        (["--address=10.96.0.1:80"], 2),
        (["--address=10.0.0.1"], 1),
        (["--address=10.96.0.1:81"], 0),
    ],
)
def test_flows_are_filtered_by_service_and_by_any_address(
    maps: Maps, made: BpfPlace, arguments: list[str], count: int
) -> None:
    write(maps, a_flow(1), a_flow(2, masquerade="10.0.0.1"))
    assert len(dumped(made, "conntrack", *arguments)) == count


def test_every_output_format_has_all_of_many_rows(maps: Maps, made: BpfPlace) -> None:
    write(maps, *(a_flow(n, last_seen=ago(1)) for n in range(5000)))
    rows = dumped(made, "conntrack")
    assert len({row["client"] for row in rows}) == 5000
    lines = dump(made, "conntrack").output.splitlines()
    assert [line.split()[2] for line in lines[1:] if line] == [row["client"] for row in rows]
    again = yaml.load(dump(made, "conntrack", "-o", "yaml").output, Loader=yaml.CSafeLoader)
    assert [row["client"] for row in again] == [row["client"] for row in rows]


def test_devices_are_shown_as_the_map_and_the_kernel_have_them(maps: Maps, view: View) -> None:
    none = parse_address("0.0.0.0"), parse_address("::")
    loopback = if_nametoindex("lo")
    maps["devices"].update(_U32.pack(loopback), abi.DEVICE.pack(*none, 0, bytes(6)))
    pod = parse_address("10.0.0.1"), parse_address("fd00::1"), abi.DEVICE_POD | abi.DEVICE_LAYER3, bytes(6)
    maps["devices"].update(_U32.pack(999_999), abi.DEVICE.pack(*pod))
    assert [tuple(row) for row in view.devices()] == [
        ("lo", loopback, "net", "ethernet", [], 0, 0, "none", [], "", "none"),
        ("?", 999_999, "pod", "ip", ["10.0.0.1", "fd00::1"], 0, 0, "none", [], "no such device", "none"),
    ]


@pytest.mark.parametrize(("flags", "clsact"), [(abi.DEVICE_CLSACT, "own"), (0, "other")])
def test_a_device_with_a_filter_on_one_side_shows_its_program_and_the_clsact_owner(
    maps: Maps, view: View, flags: int, clsact: str
) -> None:
    none = parse_address("0.0.0.0"), parse_address("::")
    with namespace("flow-view") as node, node.entered():
        node.ip("link add n0 type veth peer name n1")
        ifindex = if_nametoindex("n0")
        with contextlib.closing(load_program(SCHED_CLS, 0)) as program:
            tc.attach(ifindex, tc.Side.EGRESS, program)
            maps["devices"].update(_U32.pack(ifindex), abi.DEVICE.pack(*none, flags, bytes(6)))
            (row,) = view.devices()
            assert tuple(row) == ("n0", ifindex, "net", "ethernet", [], 0, program.id, clsact, [], "", "none")


def count_traffic(maps: Maps, *numbers: int) -> None:
    """Write these numbers for each CPU."""
    maps["traffic"].update(_U32.pack(SERVICE), abi.TRAFFIC.pack(*numbers) * possible_cpus())


def test_counters_are_summed_over_all_cpus(maps: Maps, made: BpfPlace) -> None:
    at = _U32.pack(abi.CONSTANTS["COUNTER_SOURCE_REFUSED"])
    maps["counters"].update(at, b"".join(struct.pack("=Q", cpu + 1) for cpu in range(possible_cpus())))
    total = sum(range(1, possible_cpus() + 1))
    (row,) = (row for row in dumped(made, "counters")["counters"] if row["counter"] == "source_refused")
    assert (row["value"], row["per_cpu"]) == (total, list(range(1, possible_cpus() + 1)))
    with contextlib.closing(Readings(made.bpffs / "programs-view" / "maps")) as readings:
        assert readings.counters()["source_refused"] == total
        assert len(readings.counters()) == abi.CONSTANTS["COUNTERS"]


def test_only_services_with_traffic_are_shown(maps: Maps, made: BpfPlace) -> None:
    maps["service_names"].update(_U32.pack(6), abi.SERVICE_NAME.pack(b"default/idle", 17, 6))
    count_traffic(maps, 1, 2, 3, 4, 5)
    n = possible_cpus()
    with contextlib.closing(Readings(made.bpffs / "programs-view" / "maps")) as readings:
        assert readings.traffic() == [
            ServiceTraffic("default/web:http", "TCP", "IPv4", n, 2 * n, 3 * n, 4 * n, 5 * n)
        ]
    (row,) = dumped(made, "counters", "--service=default/web")["traffic"]
    assert row["service"] == "default/web:http"
    assert (row["protocol"], row["family"], row["bytes_out"]) == ("TCP", "IPv4", 5 * n)
    assert dumped(made, "counters", "--service=default/idle") == {"traffic": []}


def test_services_without_an_entry_are_one_row(maps: Maps, made: BpfPlace) -> None:
    maps["service_names"].update(_U32.pack(9), abi.SERVICE_NAME.pack(b"default/last", 17, 6))
    maps["traffic"].update(_U32.pack(0), abi.TRAFFIC.pack(1, 2, 3, 4, 5) * possible_cpus())
    (row,) = dumped(made, "counters")["traffic"]
    assert (row["service"], row["protocol"], row["family"]) == (OTHER, "", "")
    assert row["packets_in"] == 2 * possible_cpus()
    assert "note:" not in dump(made, "counters").stderr


def test_dump_says_that_traffic_is_not_counted_by_service() -> None:
    with bpf_place() as place:
        folder = build_maps(place, dataclasses.replace(_SIZES, traffic=0), "programs-view")
        Pins(place.bpffs).set_current(folder.parent)
        assert "--ebpf-traffic-max=0" in dump(place, "counters").stderr
        assert dumped(place, "counters")["traffic"] == []
        assert "note:" not in dump(place, "endpoints").stderr


def test_a_reading_after_close_raises_not_found(maps: Maps, made: BpfPlace) -> None:
    """A scrape may arrive while the agent ends. Its file descriptors may already have been reused."""
    readings = Readings(made.bpffs / "programs-view" / "maps")
    readings.close()
    for read in (readings.counters, readings.traffic):
        with pytest.raises(NotFound, match="closed"):
            read()


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_dump_all_has_every_part(maps: Maps, made: BpfPlace, output: str) -> None:
    write(maps, a_flow(1))
    text = dump(made, "all", "-o", output).output
    parts = ["services", "endpoints", "ranges", "affinity", "sockets", "conntrack", "nat"]
    parts += ["devices", "networks", "settings", "counters", "traffic", "maps"]
    if output == "table":
        assert [part for part in parts if f"\n{part}" not in f"\n{text}"] == []
    else:
        content = json.loads(text) if output == "json" else yaml.safe_load(text)
        assert list(content) == ["header", *parts]
        assert (len(content["conntrack"]), len(content["nat"]), content["services"]) == (1, 2, [])
        assert {"map": "flows", "entries": 1, "room": 65536} in content["maps"]


def test_a_saved_dump_shows_what_the_maps_show(
    maps: Maps, view: View, made: BpfPlace, tmp_path: Path
) -> None:
    write(maps, *(a_flow(n, masquerade="10.0.0.1", family=family) for n in range(3) for family in (4, 6)))
    maps["local_networks"].update(abi.NETWORK_KEY.pack(104, parse_address("127.0.0.0")), _U32.pack(3))
    source = abi.SOURCE_RANGE_KEY.pack(32 + 120, SERVICE, parse_address("203.0.113.0"))
    maps["source_ranges"].update(source, _U32.pack(1))
    path = tmp_path / "dump.json"
    path.write_text(dump(made, "all", "-o", "json").output)
    saved = SavedView(path)
    assert saved.ranges() == [("default/web:http", "203.0.113.0/24", SERVICE, "")]
    assert ("127.0.0.0/8", True, True, False) in saved.networks()
    for section in (each for each in SECTIONS if each != "conntrack"):  # it has ages
        assert SECTIONS[section].rows(saved) == list(SECTIONS[section].rows(view))
    shown = dump(made, "nat").output
    assert dump(made, "nat", f"--from-dump={path}").output == shown
    assert len({row.client for row in saved.conntrack()}) == 6


def test_the_service_filter_is_rejected_for_tables_without_services(maps: Maps, made: BpfPlace) -> None:
    with pytest.raises(ConfigError, match="--service"):
        dump(made, "devices", "--service=default/web")
    assert "devices" not in dumped(made, "all", "--service=default/web")
