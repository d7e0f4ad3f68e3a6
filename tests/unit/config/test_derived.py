"""Every option reaches the part that it is for."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.config import Config
from ebpfproxy.config.derived import ebpf_settings, plan_context
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfSettings, FlowTimeouts
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.plan.service_plan import PlanContext, SocketLb
from tests.support.build import networks

CGROUP = Path("/sys/fs/cgroup")


def settings(**texts: Any) -> EbpfSettings:
    return ebpf_settings(Config.parse(texts), CGROUP)


def test_no_flags_make_what_the_parts_have_as_defaults() -> None:
    assert settings() == EbpfSettings(CGROUP, Path("/sys/fs/bpf/ebpfproxy"))
    assert plan_context(Config.parse({"hostname_override": "here"})) == PlanContext("here")


def test_every_size_has_an_option() -> None:
    names = [field.name for field in dataclasses.fields(MapSizes)]
    texts = {f"ebpf_{name}_max": str(number) for number, name in enumerate(names, 1)}
    assert settings(**texts).sizes == MapSizes(*range(1, len(names) + 1))


def test_timeouts_are_those_of_the_flags() -> None:
    given = settings(
        conntrack_tcp_timeout_established="2h",
        conntrack_tcp_timeout_close_wait="10m",
        conntrack_udp_timeout="10s",
        conntrack_udp_timeout_stream="1500ms",
    )
    assert given.timeouts == FlowTimeouts(tcp_established=7200, tcp_close_wait=600, udp=10, udp_stream=2)


@pytest.mark.parametrize("which", ["tcp_timeout_established", "tcp_timeout_close_wait", "udp_timeout_stream"])
def test_a_timeout_of_0_is_the_usual_one(which: str) -> None:
    assert settings(**{f"conntrack_{which}": "0s"}).timeouts == FlowTimeouts()


def test_the_rest_of_the_flags_of_the_packet_path() -> None:
    config = Config.parse(
        {
            "socket_lb": "host",
            "tc_devices": ("eth*,bond0", "wg0"),
            "ebpf_redirect": "true",
            "masquerade_all": "true",
            "nodeport_addresses": ("192.0.2.0/24",),
            "iptables_localhost_nodeports": "false",
            "hostname_override": "here",
        }
    )
    assert plan_context(config) == PlanContext(
        "here",
        masquerade_all=True,
        localhost_node_ports=False,
        node_port_cidrs=networks(["192.0.2.0/24"]),
        socket_lb=SocketLb.HOST,
        device_patterns=("eth*", "bond0", "wg0"),
    )
    given = ebpf_settings(config, CGROUP)
    assert (given.socket_lb, given.redirect) == (SocketLb.HOST, True)


def test_the_dataplane_has_devices_unless_none_are_named() -> None:
    assert settings(tc_devices=("eth0",)).devices
    assert not settings(tc_devices=("none",)).devices
