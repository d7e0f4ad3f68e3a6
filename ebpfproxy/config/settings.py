"""`Config`: every option of ebpfproxy, each declared once.

Names, meaning and defaults of flags that kube-proxy has are kube-proxy's (cmd/kube-proxy/app/options.go),
so that the arguments of a DaemonSet carry over; options of our own say so in their help.
"""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ebpfproxy.config import kinds
from ebpfproxy.config.kinds import NodePortAddresses
from ebpfproxy.config.option import Option, declared_by, option
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import Address, Family, Network, family, format_address, unspecified
from ebpfproxy.plan.service_plan import SocketLb

HEALTHZ_PORT, METRICS_PORT = 10256, 10249

_CLUSTER = "The cluster and this node"
_TRAFFIC = "Traffic"
_HTTP = "HTTP servers"
_KERNEL = "Kernel (ebpfproxy's own)"
_PROCESS = "The process"


def _parse_mode(text: str) -> str:
    if text in NOT_BUILT_IN:
        raise ValueError(f'"{text}" is not built in this version yet')
    return str(_MODE.parse(text))


NOT_BUILT_IN = frozenset({"iptables", "nftables", "ipvs", "userspace"})
_MODE = kinds.one_of("auto", "ebpf")
_PROXY_MODE = kinds.Kind(_MODE.metavar, _parse_mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Durations are in seconds. A path that is None stands for an option not given."""

    kubeconfig: Path | None = option(
        "--kubeconfig", kinds.PATH, "", _CLUSTER,
        "How to reach and log in to the API server. Without this and --master: as a pod does.",
    )  # fmt: skip
    master: str = option(
        "--master", kinds.TEXT, "", _CLUSTER,
        "URL of the API server; overrides the one in the kubeconfig.",
    )  # fmt: skip
    manifests: Path | None = option(
        "--manifests", kinds.DIRECTORY, "", _CLUSTER,
        "Read Services, EndpointSlices and Nodes from the YAML and JSON files in this folder, and follow "
        "their changes, instead of asking an API server (ebpfproxy's own).",
    )  # fmt: skip
    hostname_override: str = option(
        "--hostname-override", kinds.NODE_NAME, "", _CLUSTER,
        "Name of this node's Node object. Default: the host's name.",
    )  # fmt: skip

    proxy_mode: str = option(
        "--proxy-mode", _PROXY_MODE, "auto", _TRAFFIC,
        "The kernel mechanism; auto takes the first that works here.",
    )  # fmt: skip
    bind_address: Address = option(
        "--bind-address", kinds.IP, "0.0.0.0", _TRAFFIC,
        "Nothing is bound to it: its family is the one the HTTP servers listen in by default.",
    )  # fmt: skip
    masquerade_all: bool = option(
        "--masquerade-all", kinds.BOOLEAN, "false", _TRAFFIC,
        "Masquerade everything that is sent to a ClusterIP: packets, that is; a socket of this node "
        "that is sent to an endpoint has no packets to masquerade.",
    )  # fmt: skip
    nodeport_addresses: NodePortAddresses = option(
        "--nodeport-addresses", kinds.NODE_PORT_ADDRESSES, "", _TRAFFIC,
        "Answer NodePorts only on addresses of this node in these networks, or only on those of its Node "
        "object (primary). May be given more than once. Default: on all.",
    )  # fmt: skip
    iptables_localhost_nodeports: bool = option(
        "--iptables-localhost-nodeports", kinds.BOOLEAN, "true", _TRAFFIC,
        "Answer NodePorts on 127.0.0.1, too. The name is kube-proxy's; here it needs no iptables.",
    )  # fmt: skip
    conntrack_tcp_timeout_established: int = option(
        "--conntrack-tcp-timeout-established", kinds.TIMEOUT, "24h", _TRAFFIC,
        "For how long an established TCP connection may be idle (0: 24h).",
    )  # fmt: skip
    conntrack_tcp_timeout_close_wait: int = option(
        "--conntrack-tcp-timeout-close-wait", kinds.TIMEOUT, "1h", _TRAFFIC,
        "For how long a TCP connection that one side has closed may be idle (0: 1h).",
    )  # fmt: skip
    conntrack_udp_timeout: int = option(
        "--conntrack-udp-timeout", kinds.TIMEOUT, "0s", _TRAFFIC,
        "For how long a UDP flow that was never answered may be idle (0: 30s).",
    )  # fmt: skip
    conntrack_udp_timeout_stream: int = option(
        "--conntrack-udp-timeout-stream", kinds.TIMEOUT, "0s", _TRAFFIC,
        "For how long a UDP flow that was answered may be idle (0: 180s).",
    )  # fmt: skip
    sync_period: float = option(
        "--sync-period", kinds.duration(zero=False), "30s", _TRAFFIC,
        "How often the kernel is read back, compared and repaired (ebpfproxy's own).",
    )  # fmt: skip
    min_sync_period: float = option(
        "--min-sync-period", kinds.duration(zero=True), "0s", _TRAFFIC,
        "The least time between two syncs, however many changes come (ebpfproxy's own).",
    )  # fmt: skip

    healthz_bind_address: str | None = option(
        "--healthz-bind-address", kinds.LISTEN_ADDRESS, None, _HTTP,
        'Where /healthz and /livez are served; "" for nowhere. '
        "Default: 0.0.0.0:10256, [::]:10256 where --bind-address is IPv6.",
    )  # fmt: skip
    metrics_bind_address: str | None = option(
        "--metrics-bind-address", kinds.LISTEN_ADDRESS, None, _HTTP,
        'Where /metrics and /proxyMode are served; "" for nowhere. '
        "Default: 127.0.0.1:10249, [::1]:10249 where --bind-address is IPv6.",
    )  # fmt: skip
    bind_address_hard_fail: bool = option(
        "--bind-address-hard-fail", kinds.BOOLEAN, "false", _HTTP,
        "End when one of these addresses cannot be listened on, rather than try every 5 seconds.",
    )  # fmt: skip
    healthz_port: int = option(
        "--healthz-port", kinds.PORT, str(HEALTHZ_PORT), _HTTP,
        "Deprecated: the port where --healthz-bind-address names none; 0 for no server.",
    )  # fmt: skip
    metrics_port: int = option(
        "--metrics-port", kinds.PORT, str(METRICS_PORT), _HTTP,
        "Deprecated: the port where --metrics-bind-address names none; 0 for no server.",
    )  # fmt: skip

    cgroup_root: Path | None = option(
        "--cgroup-root", kinds.OPTIONAL_DIRECTORY, "", _KERNEL,
        "The host's cgroup v2 root, where sockets are caught. Default: found by itself.",
    )  # fmt: skip
    bpffs_root: Path = option(
        "--bpffs-root", kinds.ABSOLUTE_PATH, "/sys/fs/bpf/ebpfproxy", _KERNEL,
        "Where programs, maps and links are pinned.",
    )  # fmt: skip
    proc_root: Path = option(
        "--proc-root", kinds.ABSOLUTE_PATH, "/proc", _KERNEL,
        "The host's proc file system, where the network namespaces of pods are found.",
    )  # fmt: skip
    socket_lb: SocketLb = option(
        "--socket-lb", kinds.SOCKET_LB, "on", _KERNEL,
        "Whose sockets are sent to an endpoint when they connect, which costs nothing afterwards; the "
        "packets of all others are translated. on: those of pods and of the node; host: of the node "
        "alone; off: nobody's. Everything works with each. Service meshes whose sidecars must see the "
        "Service's address need host or off.",
    )  # fmt: skip
    tc_devices: tuple[str, ...] = option(
        "--tc-devices", kinds.DEVICE_PATTERNS, "", _KERNEL,
        "Translate packets on the network devices of these names or patterns, such as eth*, and on no "
        "others but loopback. May be given more than once. none: on no device at all, so that another agent "
        "may have those of this network namespace. Default: found by what they are: uplinks, tunnels, and "
        "devices of pods as far as these need it.",
    )  # fmt: skip
    ebpf_redirect: bool = option(
        "--ebpf-redirect", kinds.BOOLEAN, "false", _KERNEL,
        "Send flows to another node's endpoint past this node's network stack: faster, but this node's "
        "FORWARD rules and connection tracking do not see them.",
    )  # fmt: skip
    ebpf_flows_max: int = option(
        "--ebpf-flows-max", kinds.ENTRIES, "524288", _KERNEL,
        "Entries for flows whose packets are translated: two or three for each flow.",
    )  # fmt: skip
    ebpf_source_ranges_max: int = option(
        "--ebpf-source-ranges-max", kinds.ENTRIES, "65536", _KERNEL,
        "Source ranges of load balancers that the maps hold, over all ServicePorts.",
    )  # fmt: skip
    ebpf_services_max: int = option(
        "--ebpf-services-max", kinds.ENTRIES, "65536", _KERNEL,
        "Frontends that the maps hold: each address, port and protocol of a Service is one.",
    )  # fmt: skip
    ebpf_slots_max: int = option(
        "--ebpf-slots-max", kinds.ENTRIES, "1048576", _KERNEL,
        "Slots that the maps hold: one for each endpoint of each ServicePort.",
    )  # fmt: skip
    ebpf_endpoints_max: int = option(
        "--ebpf-endpoints-max", kinds.ENTRIES, "262144", _KERNEL,
        "Different endpoints that the maps hold.",
    )  # fmt: skip
    ebpf_affinity_max: int = option(
        "--ebpf-affinity-max", kinds.ENTRIES, "65536", _KERNEL,
        "Clients with session affinity that are remembered; beyond that the oldest is forgotten.",
    )  # fmt: skip
    ebpf_sockets_max: int = option(
        "--ebpf-sockets-max", kinds.ENTRIES, "262144", _KERNEL,
        "Sockets connected to a Service that are remembered, in each map of them.",
    )  # fmt: skip

    oom_score_adj: int = option(
        "--oom-score-adj", kinds.integer(-1000, 1000), "-999", _PROCESS,
        "How willingly the kernel ends this process when memory runs out; the lower, the less.",
    )  # fmt: skip
    verbosity: int = option(
        "-v --v", kinds.integer(0, 100), "0", _PROCESS,
        "How much is logged; 4 and more shows every decision, and tracebacks.",
    )  # fmt: skip
    logging_format: str = option(
        "--logging-format", kinds.one_of("text", "json"), "text", _PROCESS,
        "The form of log lines.",
    )  # fmt: skip
    cleanup: bool = option(
        "--cleanup", kinds.BOOLEAN, "false", _PROCESS,
        "Remove all that ebpfproxy put into this node's kernel, and end.",
    )  # fmt: skip

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> "Config":
        """The configuration that these texts of flags, by field name, make; None for one not given.

        Raises one ConfigError that has a line for each option that is wrong.
        """
        values, problems = _parse(texts, OPTIONS)
        if not problems:
            config = cls(**values)
            problems = list(config._conflicts())
            if not problems:
                return config
        raise _refusal(problems, texts)

    def _conflicts(self) -> Iterator[str]:
        """What is wrong between options that are right alone."""
        if self.min_sync_period > self.sync_period:
            yield f"--min-sync-period: is longer than --sync-period ({self.sync_period:g}s)"
        if self.manifests and (self.kubeconfig or self.master):
            yield "--manifests: stands in for an API server, so leave --kubeconfig and --master out"

    @property
    def node_name(self) -> str:
        """The name of our Node object, in lower case as all such names are.

        Raises ConfigError where the host has no name.
        """
        name = (self.hostname_override or os.uname().nodename).strip().lower()
        if not name:
            raise ConfigError(
                "the host has no name", "give the name of this node's Node: --hostname-override"
            )
        return name

    @property
    def node_port_cidrs(self) -> tuple[Network, ...]:
        """Empty where NodePorts answer on every local address, or on the primary ones."""
        return self.nodeport_addresses.networks

    @property
    def node_port_primary(self) -> bool:
        return self.nodeport_addresses.primary

    @property
    def healthz_listen(self) -> tuple[str, int] | None:
        """Address and port for /healthz; None where it is switched off."""
        any_address = format_address(unspecified(family(self.bind_address)))
        return _listen(self.healthz_bind_address, any_address, self.healthz_port)

    @property
    def metrics_listen(self) -> tuple[str, int] | None:
        """Address and port for /metrics; None where it is switched off."""
        loopback = "127.0.0.1" if family(self.bind_address) is Family.IPV4 else "::1"
        return _listen(self.metrics_bind_address, loopback, self.metrics_port)


def _listen(text: str | None, default: str, port: int) -> tuple[str, int] | None:
    """As kube-proxy's addressFromDeprecatedFlags: port 0 switches the server off, whatever the address."""
    if text == "" or port == 0:
        return None
    return kinds.split_listen_address(default if text is None else text, port)


OPTIONS: Mapping[str, Option] = declared_by(Config)


def parse_some(texts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The values of a few options alone, for a command that needs no more.

    Raises one ConfigError that has a line for each option that is wrong.
    """
    values, problems = _parse(texts, {name: OPTIONS[name] for name in names})
    if problems:
        raise _refusal(problems, texts)
    return values


def _parse(texts: Mapping[str, Any], declared: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, each in declared.items():
        try:
            values[name] = each.parse(texts.get(name))
        except ValueError as error:
            problems.append(f"{each.flag}: {error}")
    return values, problems


def _refusal(problems: list[str], texts: Mapping[str, Any]) -> ConfigError:
    hint = ""
    if texts.get("proxy_mode") in NOT_BUILT_IN:
        hint = "--proxy-mode=ebpf is what this version has; auto chooses among what it has"
    return ConfigError("\n".join(problems), hint)
