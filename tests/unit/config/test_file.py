"""A KubeProxyConfiguration: its fields as options, strict decoding told, wrong shapes rejected."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.config.file import (
    DUPLICATE_FIELD,
    FIELDS_WITHOUT_EFFECT,
    FURTHER_DOCUMENTS,
    UNKNOWN_FIELD,
    FileReading,
    read_configuration,
)
from ebpfproxy.config.load import Remark
from ebpfproxy.config.settings import OPTIONS, Config
from ebpfproxy.config.unsupported_flags import FIELDS
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import parse_network

PATH = Path("config.conf")
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

KUBEADMS = (
    HEAD
    + """\
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null,
   tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs:
  {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s,
   tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging:
  {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"""
)
"""What kubeadm 1.31 puts into the ConfigMap kube-proxy."""


def read(text: str) -> FileReading:
    return read_configuration(PATH, (HEAD + text).encode())


def config_of(text: str) -> Config:
    reading = read(text)
    return Config.parse(reading.texts, reading.labels, reading.problems)


def rejection(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(text)
    return caught.value.message.splitlines()


def test_kubeadms_file_sets_two_options_and_the_others_have_defaults() -> None:
    reading = read_configuration(PATH, KUBEADMS.encode())
    assert (reading.remarks, reading.problems) == ((), ())
    given = Config.parse(reading.texts)
    kubeconfig = Path("/var/lib/kube-proxy/kubeconfig.conf")
    assert dataclasses.replace(given, cluster_cidr=()) == dataclasses.replace(Config(), kubeconfig=kubeconfig)
    assert list(map(str, given.cluster_cidr)) == ["10.244.0.0/16"]


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("mode: nftables", "proxy_mode", "nftables"),
        ("bindAddress: '::'", "bind_address", "::"),
        ("bindAddressHardFail: true", "bind_address_hard_fail", "true"),
        ("clusterCIDR: 10.0.0.0/8,fd00::/8", "cluster_cidr", "10.0.0.0/8,fd00::/8"),
        ("detectLocalMode: NodeCIDR", "detect_local_mode", "NodeCIDR"),
        ("detectLocal: {bridgeInterface: cbr0}", "pod_bridge_interface", "cbr0"),
        ("detectLocal: {interfaceNamePrefix: cali}", "pod_interface_name_prefix", "cali"),
        ("nodePortAddresses: [10.0.0.0/8, 'fd00::/8']", "nodeport_addresses", ("10.0.0.0/8", "fd00::/8")),
        ("nodePortAddresses:\n- primary\n", "nodeport_addresses", ("primary",)),
        ("iptables: {localhostNodePorts: false}", "iptables_localhost_nodeports", "false"),
        ("iptables: {masqueradeBit: 0}", "iptables_masquerade_bit", "0"),
        ("iptables: {syncPeriod: 1m}", "sync_period", "1m"),
        ("iptables: {minSyncPeriod: 2s}", "iptables_min_sync_period", "2s"),
        ("conntrack: {maxPerCore: 0}", "conntrack_max_per_core", "0"),
        ("conntrack: {min: 0}", "conntrack_min", "0"),
        ("conntrack: {tcpBeLiberal: yes}", "conntrack_tcp_be_liberal", "true"),
        ("conntrack: {tcpEstablishedTimeout: 0s}", "conntrack_tcp_timeout_established", "0s"),
        ("conntrack: {udpStreamTimeout: 300s}", "conntrack_udp_timeout_stream", "300s"),
        ("healthzBindAddress: 127.0.0.1:80", "healthz_bind_address", "127.0.0.1:80"),
        ("metricsBindAddress: 0.0.0.0", "metrics_bind_address", "0.0.0.0"),
        ("clientConnection: {kubeconfig: /etc/kubeconfig}", "kubeconfig", "/etc/kubeconfig"),
        ("hostnameOverride: Node-A", "hostname_override", "Node-A"),
        ("oomScoreAdj: 0", "oom_score_adj", "0"),
        ("logging: {format: json, verbosity: 4}", "verbosity", "4"),
    ],
)
def test_a_field_is_the_text_of_its_flag(text: str, option: str, value: Any) -> None:
    reading = read(text)
    assert reading.texts[option] == value
    assert (reading.remarks, reading.problems) == ((), ())
    assert getattr(config_of(text), option) == OPTIONS[option].parse(value)


def test_json_and_yaml_of_the_same_configuration_are_equal() -> None:
    content = (
        b'{"kind":"KubeProxyConfiguration","apiVersion":"kubeproxy.config.k8s.io/v1alpha1","oomScoreAdj":1}'
    )
    assert read_configuration(PATH, content).texts == {"oom_score_adj": "1"}


def test_an_empty_server_address_in_the_file_means_not_given() -> None:
    assert config_of('healthzBindAddress: ""\nmetricsBindAddress: ""').healthz_listen == ("0.0.0.0", 10256)


BOTH = "iptables: {masqueradeBit: 3, syncPeriod: 3s}\nnftables: {masqueradeBit: 4, minSyncPeriod: 4s}\n"


@pytest.mark.parametrize(
    ("mode", "bit", "period", "least", "idle"),
    [
        ("iptables", 3, 3.0, 1.0, "nftables.masqueradeBit, nftables.minSyncPeriod"),
        ("nftables", 4, 30.0, 4.0, "iptables.masqueradeBit, iptables.syncPeriod"),
    ],
)
def test_a_named_mode_takes_the_values_of_its_section(
    mode: str, bit: int, period: float, least: float, idle: str
) -> None:
    text = f"{BOTH}mode: {mode}"
    config = config_of(text)
    assert (config.iptables_masquerade_bit, config.sync_period, config.iptables_min_sync_period) == (
        bit,
        period,
        least,
    )
    assert [remark.values["fields"] for remark in read(text).remarks] == [idle]


@pytest.mark.parametrize("mode", ["auto", "ebpf", '""'])
def test_mode_auto_prefers_section_iptables_to_section_nftables(mode: str) -> None:
    text = "iptables: {masqueradeBit: 3, masqueradeAll: false}\n"
    reading = read(f"{text}nftables: {{masqueradeBit: 4, masqueradeAll: true}}\nmode: {mode}")
    assert reading.texts["iptables_masquerade_bit"] == "3"
    assert reading.texts["masquerade_all"] == "true"
    assert [remark.values["fields"] for remark in reading.remarks] == ["nftables.masqueradeBit"]


def test_mode_ipvs_takes_the_values_of_section_ipvs() -> None:
    config = config_of(
        "mode: ipvs\nipvs: {scheduler: lc, excludeCIDRs: [10.0.0.0/8, 'fd00::/8'], strictARP: true,"
        " syncPeriod: 7s, minSyncPeriod: 2s, tcpTimeout: 1h, tcpFinTimeout: 2m, udpTimeout: 3s}\n"
    )
    assert (config.proxy_mode, config.ipvs_scheduler, config.ipvs_strict_arp) == ("ipvs", "lc", True)
    assert config.ipvs_exclude_cidrs == (parse_network("10.0.0.0/8"), parse_network("fd00::/8"))
    assert (config.sync_period, config.ipvs_min_sync_period) == (7.0, 2.0)
    assert (config.ipvs_tcp_timeout, config.ipvs_tcpfin_timeout, config.ipvs_udp_timeout) == (3600, 120, 3)


def test_mode_ipvs_takes_options_without_a_field_in_section_ipvs_from_section_iptables() -> None:
    config = config_of("mode: ipvs\niptables: {masqueradeBit: 3, masqueradeAll: true, syncPeriod: 9s}\n")
    assert (config.iptables_masquerade_bit, config.masquerade_all, config.sync_period) == (3, True, 30.0)


def test_mode_ipvs_ignores_section_nftables() -> None:
    text = "mode: ipvs\nnftables: {masqueradeBit: 3, masqueradeAll: true, syncPeriod: 9s}\n"
    config = config_of(text)
    assert (config.iptables_masquerade_bit, config.masquerade_all, config.sync_period) == (14, False, 30.0)
    (remark,) = read(text).remarks
    assert remark.values["fields"] == "nftables.masqueradeAll, nftables.masqueradeBit, nftables.syncPeriod"


@pytest.mark.parametrize(
    ("mode", "other"), [("ipvs", "iptables"), ("iptables", "ipvs"), ("nftables", "ipvs")]
)
def test_a_minimum_sync_period_of_another_mode_may_exceed_the_sync_period(mode: str, other: str) -> None:
    config = config_of(f"mode: {mode}\n{mode}: {{syncPeriod: 5s}}\n{other}: {{minSyncPeriod: 10s}}\n")
    assert config.proxy_mode == mode


def test_sections_with_equal_values_cause_no_remark() -> None:
    assert read("iptables: {syncPeriod: 5s}\nnftables: {syncPeriod: 5s}").remarks == ()


def test_localhost_node_ports_of_section_iptables_apply_in_every_mode() -> None:
    assert (
        config_of("mode: nftables\niptables: {localhostNodePorts: false}").iptables_localhost_nodeports
        is False
    )


def test_an_unknown_field_is_reported_with_path_and_line_and_ignored() -> None:
    reading = read(
        "mode: iptables\niptables:\n  masqueradebit: 9\n  masqueradeBit: 3\nclusterCidr: 10.0.0.0/8\n"
    )
    assert reading.texts == {"proxy_mode": "iptables", "iptables_masquerade_bit": "3"}
    assert reading.remarks == (
        Remark(
            UNKNOWN_FIELD,
            {
                "file": PATH,
                "line": 5,
                "field": "iptables.masqueradebit",
                "hint": "did you mean iptables.masqueradeBit?",
            },
        ),
        Remark(
            UNKNOWN_FIELD,
            {"file": PATH, "line": 7, "field": "clusterCidr", "hint": "did you mean clusterCIDR?"},
        ),
    )


def test_a_field_name_with_a_dot_is_unknown() -> None:
    reading = read("iptables.masqueradeBit: 3")
    assert reading.texts == {}
    assert [remark.message for remark in reading.remarks] == [UNKNOWN_FIELD]


def test_of_a_duplicate_field_only_the_last_one_counts_and_a_remark_names_it() -> None:
    reading = read(
        "mode: ipvs\niptables: {masqueradeBit: 3, syncPeriod: 9s}\n"
        "mode: iptables\niptables: {masqueradeBit: 4}\n"
    )
    assert reading.texts == {"proxy_mode": "iptables", "iptables_masquerade_bit": "4"}
    assert [
        (remark.message, remark.values["field"], remark.values["line"]) for remark in reading.remarks
    ] == [
        (DUPLICATE_FIELD, "mode", 5),
        (DUPLICATE_FIELD, "iptables", 6),
    ]


def test_fields_without_effect_are_named_in_one_remark() -> None:
    reading = read(
        "winkernel: {enableDSR: true}\nlogging: {vmodule: [{verbosity: 0}]}\n"
        "configSyncPeriod: 5m\nportRange: ''\n"
    )
    assert reading.texts == {}
    assert reading.remarks == (
        Remark(
            FIELDS_WITHOUT_EFFECT,
            {"file": PATH, "fields": "configSyncPeriod, logging.vmodule, winkernel.enableDSR"},
        ),
    )


@pytest.mark.parametrize(("value", "allowed"), [("false", False), ("no", False), ("true", True)])
def test_the_gate_of_external_ips_may_be_the_only_feature_gate(value: str, allowed: bool) -> None:
    """A map is not unset because all of its values are false (KEP-5707)."""
    config = config_of(f"featureGates: {{AllowServiceExternalIPs: {value}}}")
    assert config.feature_gates == (("AllowServiceExternalIPs", allowed),)
    assert config.allow_external_ips is allowed


@pytest.mark.parametrize("text", ["", "featureGates:", "featureGates: {}", "featureGates: {AllAlpha: false}"])
def test_without_its_gate_external_ips_are_allowed(text: str) -> None:
    assert config_of(text).allow_external_ips


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("featureGates: A=true", "featureGates: is not a mapping, such as {Name: true}"),
        ("featureGates: {A: 'true'}", 'featureGates: A: "true" is text: write it without quotes'),
        ("featureGates: {A: maybe}", 'featureGates: A: "maybe" is neither true nor false'),
        ("featureGates: {A: [true]}", "featureGates: A: is not a single value"),
        ("iptables: {masqueradeAll: {a: false}}", "iptables.masqueradeAll: is not a single value"),
        ("iptables: {syncPeriod: [0]}", "iptables.syncPeriod: is not a single value"),
    ],
)
def test_a_value_of_the_wrong_shape_does_not_count_as_unset(text: str, problem: str) -> None:
    assert rejection(text) == [f"config.conf:3: {problem}"]


def test_documents_after_the_first_are_ignored_with_a_remark() -> None:
    reading = read("mode: iptables\n---\nmode: nftables\n")
    assert reading.texts == {"proxy_mode": "iptables"}
    assert [remark.message for remark in reading.remarks] == [FURTHER_DOCUMENTS]


def test_all_invalid_fields_are_reported_at_once_with_file_line_and_path() -> None:
    assert rejection(
        "mode: kernelspace\n"
        "iptables: {masqueradeBit: 32, masqueradeAll: 'true'}\n"
        "conntrack:\n  min: '3'\n  maxPerCore: [1]\n"
        "nodePortAddresses: 10.0.0.0/8\n"
        "oomScoreAdj: 1.5\n"
        "bindAddressHardFail: maybe\n"
    ) == [
        'config.conf:4: iptables.masqueradeAll: "true" is text: write it without quotes',
        "config.conf:8: nodePortAddresses: is not a list, such as [first, second]",
        "config.conf:7: conntrack.maxPerCore: is not a single value",
        'config.conf:6: conntrack.min: "3" is text: write it without quotes',
        'config.conf:3: mode: "kernelspace" is not one of auto, ebpf, nftables, iptables, ipvs, userspace',
        "config.conf:4: iptables.masqueradeBit: 32 is not between 0 and 31",
        'config.conf:10: bindAddressHardFail: "maybe" is neither true nor false',
        'config.conf:9: oomScoreAdj: "1.5" is not a whole number',
    ]


def test_a_udp_timeout_of_zero_in_the_file_is_the_default() -> None:
    """kubeadm writes it so."""
    assert config_of("udpIdleTimeout: 0s").udp_timeout == 0.25
    assert config_of("udpIdleTimeout: 2s").udp_timeout == 2.0


def test_a_conflict_is_reported_with_the_names_of_the_fields() -> None:
    assert rejection("detectLocalMode: BridgeInterface") == [
        "config.conf: detectLocal.bridgeInterface: must be set for local traffic detection BridgeInterface"
    ]
    assert rejection("iptables: {minSyncPeriod: 40s}") == [
        "config.conf:3: iptables.minSyncPeriod: must not be longer than "
        "config.conf: iptables.syncPeriod (30s)"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", 'config.conf: apiVersion: is not "kubeproxy.config.k8s.io/v1alpha1"'),
        ("mode: iptables", 'config.conf: apiVersion: is not "kubeproxy.config.k8s.io/v1alpha1"'),
        (HEAD.replace("v1alpha1", "v1alpha2"), "config.conf:1: apiVersion: is not "),
        (HEAD.replace("KubeProxy", "Kubelet"), 'config.conf:2: kind: is not "KubeProxyConfiguration"'),
        ("- 1", "config.conf:1: KubeProxyConfiguration: is not a mapping"),
        ("just words", "config.conf:1: KubeProxyConfiguration: is not a mapping"),
        (HEAD + "iptables: 3", "config.conf:3: iptables: is not a mapping"),
        (HEAD + "iptables: {? [a] : b}", "config.conf:3: iptables: a field name must be a single value"),
    ],
)
def test_a_file_that_is_not_a_kube_proxy_configuration_is_rejected(content: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_configuration(PATH, content.encode())
    assert caught.value.message.startswith(message)


def test_each_field_belongs_to_at_most_one_option() -> None:
    fields = [field for option in OPTIONS.values() for field in option.fields]
    assert len(set(fields)) == len(fields)
    assert not FIELDS & set(fields)


_FIELDS = sorted(FIELDS | {field for option in OPTIONS.values() for field in option.fields})
_NASTY = [
    "0s",
    "1h",
    "-1s",
    "9" * 400 + "h",
    "9" * 400,
    "10.0.0.0/8",
    "::",
    "\0",
    "null",
    "a" * 5000,
    "é",
    ",",
    ".",
]
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(_NASTY)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def tree(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields by their whole names as a file has them; what stands where a section should be stays."""
    root: dict[str, Any] = {}
    for field, value in fields.items():
        *sections, last = field.split(".")
        place = root
        for section in sections:
            inner = place.setdefault(section, {})
            place = inner if isinstance(inner, dict) else {}
        place[last] = value
    return root


@given(st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=9), _VALUES, max_size=9))
def test_random_fields_are_accepted_or_rejected(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        config_of(yaml.safe_dump(tree(fields)))


@pytest.mark.parametrize("field", _FIELDS)
def test_a_field_with_a_random_value_is_accepted_or_rejected(field: str) -> None:
    values: list[Any] = [*_NASTY, None, True, 10**400, -1, 1e400, [], {}, [[]], [None], {"a": 1}]
    for value in values:
        for said in (value, [value]):
            with contextlib.suppress(ConfigError):
                config_of(yaml.safe_dump(tree({field: said})))


@given(st.text(max_size=60))
def test_random_text_is_accepted_or_rejected(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_configuration(PATH, (HEAD + text).encode(errors="surrogatepass"))
