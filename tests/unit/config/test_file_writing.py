"""A configuration written is one that can be read, and the same."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.config import Config
from ebpfproxy.config.file import as_yaml, read_configuration, write_configuration
from ebpfproxy.config.load import load
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.errors import ConfigError

PATH = Path("written.yaml")
_TEXTS: dict[str, list[Any]] = {
    "proxy_mode": ["auto", "ebpf", "nftables", "iptables", "ipvs", "userspace"],
    "bind_address": ["::", "192.0.2.1"],
    "masquerade_all": ["true", "0", "F"],
    "nodeport_addresses": [("10.0.0.0/8, fd00::/8", "192.0.2.0/24"), ("primary", "localhost")],
    "iptables_localhost_nodeports": ["false"],
    "feature_gates": [("AllowServiceExternalIPs=false",), ("A=true,B=0", "B=1")],
    "cluster_cidr": ["10.244.0.0/16,fd00::/48"],
    "detect_local_mode": ["NodeCIDR", "BridgeInterface"],
    "pod_bridge_interface": ["cbr0", "null", "~"],
    "iptables_masquerade_bit": ["0", "31"],
    "iptables_min_sync_period": ["500ms", "5s"],
    "sync_period": ["1m30s"],
    "ipvs_scheduler": ["lc", "on"],
    "ipvs_exclude_cidrs": [("10.0.0.0/8,fd00::/8",)],
    "ipvs_strict_arp": ["true"],
    "ipvs_min_sync_period": ["2s"],
    "ipvs_udp_timeout": ["3s"],
    "udp_timeout": ["250ms", "5s"],
    "conntrack_min": ["0"],
    "conntrack_max_per_core": ["+1"],
    "conntrack_tcp_timeout_established": ["0s", "2h"],
    "conntrack_udp_timeout": ["10s"],
    "healthz_port": ["80"],
    "metrics_bind_address": ["[::1]:9", "0.0.0.0"],
    "bind_address_hard_fail": ["true"],
    "kubeconfig": ["/etc/kube config"],
    "hostname_override": ["Node-A", "12", "on", "0"],
    "oom_score_adj": ["0", "-5"],
    "verbosity": ["4"],
    "logging_format": ["json"],
}


def without_servers(config: Config) -> Config:
    return dataclasses.replace(
        config, healthz_bind_address=None, metrics_bind_address=None, healthz_port=0, metrics_port=0
    )


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in _TEXTS.items()}))
def test_a_written_file_reads_as_the_same_configuration_without_remarks(texts: dict[str, Any]) -> None:
    if texts.get("detect_local_mode") == "BridgeInterface":
        texts = {"pod_bridge_interface": "cbr0"} | texts
    written = load(texts)
    reading = read_configuration(PATH, as_yaml(written).encode())
    assert (reading.remarks, reading.problems) == ((), ())
    read = Config.parse(reading.texts)
    assert (read.healthz_listen, read.metrics_listen) == (
        written.config.healthz_listen,
        written.config.metrics_listen,
    )
    assert without_servers(read) == without_servers(written.config)


def test_every_field_of_every_option_is_written() -> None:
    tree = yaml.safe_load(as_yaml(load({})))
    for option in OPTIONS.values():
        for field in option.fields:
            place = tree
            for part in field.split("."):
                place = place[part]
    assert tree["iptables"] == {
        "localhostNodePorts": True,
        "masqueradeAll": False,
        "masqueradeBit": 14,
        "minSyncPeriod": "1s",
        "syncPeriod": "30s",
    }
    assert (tree["nodePortAddresses"], tree["healthzBindAddress"]) == ([], "0.0.0.0:10256")


def test_the_effective_configuration_is_written(tmp_path: Path) -> None:
    source, target = tmp_path / "in.yaml", tmp_path / "out.yaml"
    source.write_text(as_yaml(load({"proxy_mode": "nftables", "sync_period": "5s"})))
    write_configuration(load({"config": str(source), "hostname_override": "here"}), target)
    assert target.read_text() == as_yaml(
        load({"proxy_mode": "nftables", "sync_period": "5s", "hostname_override": "here"})
    )


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_configuration(load({}), tmp_path)
    assert caught.value.message == f"cannot write configuration file {tmp_path}: Is a directory"
