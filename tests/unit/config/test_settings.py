"""What `Config` makes of texts: defaults, what follows from them, and what is rejected."""

import os
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.backends.ebpf.mode import xdp_mode
from ebpfproxy.config import Config
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.config.unsupported_flags import HINTS, WITHOUT_EFFECT
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import parse_address, parse_network
from ebpfproxy.plan.service_plan import DetectLocal, SocketLb


def test_without_flags_all_options_have_their_defaults() -> None:
    assert Config.parse({}) == Config()


def test_the_defaults_are_those_of_kube_proxy() -> None:
    config = Config()
    assert config.healthz_listen == ("0.0.0.0", 10256)
    assert config.metrics_listen == ("127.0.0.1", 10249)
    assert config.bind_address == parse_address("0.0.0.0")
    assert (config.bind_address_hard_fail, config.masquerade_all, config.cleanup) == (False, False, False)
    assert config.iptables_localhost_nodeports is True
    assert (config.oom_score_adj, config.verbosity, config.logging_format) == (-999, 0, "text")
    assert (config.kubeconfig, config.master, config.hostname_override) == (None, "", "")
    assert (config.node_port_cidrs, config.node_port_primary) == ((), False)
    assert config.conntrack_tcp_timeout_established == 86400
    assert config.conntrack_tcp_timeout_close_wait == 3600
    assert (config.conntrack_udp_timeout, config.conntrack_udp_timeout_stream) == (0, 0)
    assert (config.conntrack_max_per_core, config.conntrack_min) == (32768, 131072)
    assert (config.conntrack_tcp_be_liberal, config.iptables_masquerade_bit) == (False, 14)
    assert (config.detect_local_mode, config.cluster_cidr) == (DetectLocal.CLUSTER_CIDR, ())
    assert (config.sync_period, config.iptables_min_sync_period) == (30.0, 1.0)


def test_the_defaults_of_options_that_only_ebpfproxy_has() -> None:
    config = Config()
    assert (config.proxy_mode, config.min_sync_period, config.iptables_backend) == ("auto", 0.0, "auto")
    assert (config.manifests, config.cgroup_root) == (None, None)
    assert (config.bpffs_root, config.proc_root) == (Path("/sys/fs/bpf/ebpfproxy"), Path("/proc"))
    assert (config.ebpf_services_max, config.ebpf_slots_max, config.ebpf_endpoints_max) == (0, 0, 0)
    assert (config.ebpf_affinity_max, config.ebpf_sockets_max) == (65536, 0)
    assert (config.ebpf_flows_max, config.ebpf_source_ranges_max) == (0, 1048576)
    assert (config.socket_lb, config.tc_devices, config.ebpf_redirect) == (SocketLb.ON, (), False)


def test_an_ipv6_bind_address_moves_the_servers_to_ipv6() -> None:
    config = Config.parse({"bind_address": "::"})
    assert (config.healthz_listen, config.metrics_listen) == (("::", 10256), ("::1", 10249))


def test_an_explicit_address_stays_whatever_the_bind_address_is() -> None:
    config = Config.parse({"bind_address": "::", "metrics_bind_address": "0.0.0.0"})
    assert config.metrics_listen == ("0.0.0.0", 10249)


def test_an_empty_address_means_no_server() -> None:
    config = Config.parse({"healthz_bind_address": "", "metrics_bind_address": ""})
    assert (config.healthz_listen, config.metrics_listen) == (None, None)


def test_the_deprecated_port_0_means_no_server() -> None:
    config = Config.parse({"healthz_bind_address": "1.2.3.4:80", "healthz_port": "0", "metrics_port": "0"})
    assert (config.healthz_listen, config.metrics_listen) == (None, None)


def test_the_deprecated_port_is_used_where_the_address_has_none() -> None:
    config = Config.parse({"healthz_port": "80", "metrics_bind_address": "::1", "metrics_port": "81"})
    assert (config.healthz_listen, config.metrics_listen) == (("0.0.0.0", 80), ("::1", 81))


def test_the_node_is_named_by_the_override_in_lower_case() -> None:
    assert Config.parse({"hostname_override": "  Node-A.Example  "}).node_name == "node-a.example"


def test_without_an_override_the_node_has_the_hosts_name() -> None:
    assert Config().node_name == os.uname().nodename.lower()


def test_an_override_of_blanks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--hostname-override: the node name is blank"):
        Config.parse({"hostname_override": "  "})


def test_the_empty_proxy_mode_is_auto() -> None:
    assert Config.parse({"proxy_mode": ""}).proxy_mode == "auto"


@pytest.mark.parametrize("mode", ["auto", "ebpf", "nftables", "iptables", "ipvs", "userspace"])
def test_each_mode_is_accepted(mode: str) -> None:
    assert Config.parse({"proxy_mode": mode}).proxy_mode == mode


def test_an_unknown_mode_is_rejected_with_the_names_of_all_modes() -> None:
    names = "auto, ebpf, nftables, iptables, ipvs, userspace"
    with pytest.raises(ConfigError, match=f'--proxy-mode: "kernelspace" is not one of {names}'):
        Config.parse({"proxy_mode": "kernelspace"})


def test_all_invalid_options_are_reported_at_once_one_line_each() -> None:
    texts = {
        "bind_address": "nowhere",
        "sync_period": "0s",
        "oom_score_adj": "-1001",
        "nodeport_addresses": ("10.0.0.0/33",),
        "ebpf_slots_max": "-1",
        "conntrack_udp_timeout": "-1s",
        "iptables_masquerade_bit": "32",
        "cluster_cidr": "::/0,::/8",
        "socket_lb": "pods",
        "tc_devices": ("eth*", "a/b"),
        "bpffs_root": "here",
        "logging_format": "xml",
    }
    with pytest.raises(ConfigError) as caught:
        Config.parse(texts)
    assert caught.value.exit_code == 2
    assert caught.value.message.splitlines() == [
        "--bind-address: 'nowhere' is not an IP address",
        "--nodeport-addresses: '10.0.0.0/33' is not a CIDR",
        "--conntrack-udp-timeout: -1s is not between 0 and 2147483647s",
        "--sync-period: 0s must be more than 0",
        '--cluster-cidr: "::/0,::/8" has more than one CIDR of a family; give at most one of each',
        "--iptables-masquerade-bit: 32 is not between 0 and 31",
        '--bpffs-root: "here" is not an absolute path',
        '--socket-lb: "pods" is not one of on, host, off',
        '--tc-devices: "a/b" is not a pattern for device names: remove blanks and /',
        "--ebpf-slots-max: -1 is not between 0 and 67108864",
        "--oom-score-adj: -1001 is not between -1000 and 1000",
        '--logging-format: "xml" is not one of text, json',
    ]


def test_a_minimum_sync_period_longer_than_the_sync_period_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--min-sync-period: must not be longer than --sync-period"):
        Config.parse({"min_sync_period": "31s"})


def test_an_iptables_minimum_sync_period_longer_than_the_sync_period_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="--iptables-min-sync-period: must not be longer than --sync-period"
    ):
        Config.parse({"iptables_min_sync_period": "2s", "sync_period": "1s"})


def test_a_default_minimum_sync_period_longer_than_the_sync_period_is_accepted() -> None:
    assert Config.parse({"sync_period": "500ms"}).sync_period == 0.5


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        ("BridgeInterface", "pod_bridge_interface"),
        ("InterfaceNamePrefix", "pod_interface_name_prefix"),
    ],
)
def test_local_traffic_detection_by_device_requires_the_name_of_the_device(mode: str, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse({"detect_local_mode": mode})
    assert caught.value.message == f"{OPTIONS[option].flag}: must be set for local traffic detection {mode}"
    assert Config.parse({"detect_local_mode": mode, option: "cali"}).pod_interface == "cali"


def test_device_names_are_ignored_if_local_traffic_is_detected_by_address() -> None:
    config = Config.parse({"pod_bridge_interface": "br0", "pod_interface_name_prefix": "cali"})
    assert config.pod_interface == ""


def test_the_two_intervals_may_be_equal() -> None:
    assert Config.parse({"min_sync_period": "30s"}).min_sync_period == 30.0


@pytest.mark.parametrize("other", ["kubeconfig", "master"])
def test_manifests_and_an_api_server_exclude_each_other(other: str) -> None:
    with pytest.raises(ConfigError, match="--manifests: replaces the API server"):
        Config.parse({"manifests": "services", other: "there"})


@pytest.mark.parametrize("mode", ["native", "generic"])
def test_xdp_needs_redirected_flows(mode: str) -> None:
    with pytest.raises(ConfigError, match="--ebpf-xdp: needs --ebpf-redirect"):
        Config.parse({"ebpf_xdp": mode})
    config = Config.parse({"ebpf_xdp": mode, "ebpf_redirect": "true"})
    assert xdp_mode(config) == mode
    assert xdp_mode(Config.parse({})) is None


def test_values_have_the_types_of_their_options() -> None:
    config = Config.parse(
        {
            "nodeport_addresses": ("10.1.2.3/8",),
            "manifests": "services",
            "cgroup_root": "/sys/fs/cgroup",
            "masquerade_all": "true",
        }
    )
    assert config.node_port_cidrs == (parse_network("10.0.0.0/8"),)
    assert (config.manifests, config.cgroup_root) == (Path("services"), Path("/sys/fs/cgroup"))
    assert config.masquerade_all is True


def test_every_flag_is_its_fields_name_and_every_default_is_right() -> None:
    for name, option in OPTIONS.items():
        if name != "verbosity":
            assert option.flag == "--" + name.replace("_", "-")
        assert getattr(Config(), name) == option.parse(None)
        assert option.help.endswith(".")


def test_no_supported_flag_is_listed_as_unsupported() -> None:
    assert not {flag for option in OPTIONS.values() for flag in option.flags} & {*HINTS, *WITHOUT_EFFECT}


def test_direct_server_return_needs_a_port_and_devices() -> None:
    assert Config.parse({}).ebpf_dsr_port == 0
    assert Config.parse({"ebpf_forwarding": "dsr", "ebpf_dsr_port": "6083"}).ebpf_dsr_port == 6083
    with pytest.raises(ConfigError, match=r"^--ebpf-forwarding: dsr needs .* set --ebpf-dsr-port"):
        Config.parse({"ebpf_forwarding": "dsr"})
    with pytest.raises(ConfigError, match=r"^--ebpf-dsr-port: needs network devices"):
        Config.parse({"ebpf_dsr_port": "6083", "tc_devices": ("none",)})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"proxy_mode": "nftables"}, "--role: edge needs mode ebpf, not nftables"),
        ({"host_ports": "true"}, "--host-ports: an edge has no pods; leave it out"),
        (
            {"tc_devices": ("none",)},
            "--role: edge needs network devices; do not set --tc-devices to none",
        ),
    ],
)
def test_an_edge_rejects_the_options_of_a_node(options: dict[str, Any], error: str) -> None:
    Config.parse(options)
    with pytest.raises(ConfigError, match=f"^{error}$"):
        Config.parse({"role": "edge", **options})
