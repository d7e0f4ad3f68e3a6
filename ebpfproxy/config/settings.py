"""`Config`: every option of ebpfproxy, each declared once, here and in `mode_options`.

Flags of kube-proxy keep their names, meanings and defaults (cmd/kube-proxy/app/options.go), so that the
arguments of its DaemonSet work unchanged. The same holds for the fields of its configuration file
(staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go). The help marks options that only ebpfproxy has.
"""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ebpfproxy.config import flag_types
from ebpfproxy.config.edge_options import EdgeOptions
from ebpfproxy.config.flag_types import NodePortAddresses
from ebpfproxy.config.mode_options import (
    POD_INTERFACES,
    EbpfOptions,
    IpvsOptions,
    NetfilterOptions,
    UserspaceOptions,
)
from ebpfproxy.config.option import Group, Option, declared_by, option
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import Address, Family, Network, family, format_address, unspecified
from ebpfproxy.model.balancing import Algorithm, EbpfForwarding
from ebpfproxy.plan.devices import NO_DEVICES
from ebpfproxy.plan.service_plan import Protection, Role

EXTERNAL_IPS_GATE = "AllowServiceExternalIPs"
"""The feature gate of KEP-5707, on by default in kube-proxy 1.36."""

HEALTHZ_PORT, METRICS_PORT = 10256, 10249

MODES = ("auto", "ebpf", "nftables", "iptables", "ipvs", "userspace")
_NETFILTER_MINIMUM, _IPVS_MINIMUM = "iptables_min_sync_period", "ipvs_min_sync_period"
_MIN_SYNC_PERIODS = {
    "auto": (_NETFILTER_MINIMUM,),
    "ebpf": (),
    "nftables": (_NETFILTER_MINIMUM,),
    "iptables": (_NETFILTER_MINIMUM,),
    "ipvs": (_IPVS_MINIMUM,),
    "userspace": (),
}
"""The minimum sync periods, besides --min-sync-period, that must not be longer than --sync-period, by mode.
As in kube-proxy, auto does not check those of ipvs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EbpfOptions, NetfilterOptions, IpvsOptions, UserspaceOptions, EdgeOptions):
    """All options. Durations are in seconds. A path is None if the option is not given."""

    config: Path | None = option(
        "--config", flag_types.PATH, "", Group.FILE,
        "KubeProxyConfiguration file, YAML or JSON. Flags that have a field in it are then ignored, "
        "except --hostname-override, --v and --logging-format. The agent reloads a changed file. Empty: no "
        "file.",
    )  # fmt: skip
    write_config_to: Path | None = option(
        "--write-config-to", flag_types.PATH, "", Group.FILE,
        "Write the effective configuration to this file as a KubeProxyConfiguration, then exit. Empty: run "
        "the agent.",
    )  # fmt: skip

    kubeconfig: Path | None = option(
        "--kubeconfig", flag_types.PATH, "", Group.CLUSTER,
        "Kubeconfig file for the API server. Empty: use the pod's ServiceAccount; outside a pod, with "
        "--master, no credentials.",
        fields="clientConnection.kubeconfig",
    )  # fmt: skip
    master: str = option(
        "--master", flag_types.TEXT, "", Group.CLUSTER,
        "URL of the API server, such as https://10.0.0.1:6443. Empty: the URL in the kubeconfig or in the "
        "pod's environment.",
    )  # fmt: skip
    manifests: Path | None = option(
        "--manifests", flag_types.DIRECTORY, "", Group.CLUSTER,
        "Read Services, EndpointSlices, ServiceCIDRs and Nodes, and with --host-ports Pods, from the YAML "
        "and JSON files in this directory instead of the API server, and watch it for changes (ebpfproxy "
        "only). Empty: use the API server.",
    )  # fmt: skip
    hostname_override: str = option(
        "--hostname-override", flag_types.NODE_NAME, "", Group.CLUSTER,
        "Name of this node's Node object. Empty: the host name.",
        fields="hostnameOverride", over_file=True,
    )  # fmt: skip

    proxy_mode: str = option(
        "--proxy-mode", flag_types.one_of(*MODES), "auto", Group.TRAFFIC,
        "Proxy mode. auto or empty: the first of the other modes, in this order, that works on this node.",
        fields="mode",
    )  # fmt: skip
    bind_address: Address = option(
        "--bind-address", flag_types.IP, "0.0.0.0", Group.TRAFFIC,
        "IP address whose family is the default family of the HTTP servers; no server listens on it. A "
        "specific address is also this node's primary address for --nodeport-addresses=primary.",
        fields="bindAddress",
    )  # fmt: skip
    masquerade_all: bool = option(
        "--masquerade-all", flag_types.BOOLEAN, "false", Group.TRAFFIC,
        "Masquerade every packet sent to a ClusterIP. This does not affect sockets that are redirected at "
        "connect(), because they send no such packets.",
        fields="iptables.masqueradeAll nftables.masqueradeAll", zero_is_unset=True,
    )  # fmt: skip
    nodeport_addresses: NodePortAddresses = option(
        "--nodeport-addresses", flag_types.NODE_PORT_ADDRESSES, "", Group.TRAFFIC,
        "Accept NodePort connections only on node addresses in these networks. primary: the first address "
        "of each family of the Node object. localhost: loopback. all or empty: all addresses. May be "
        "repeated.",
        fields="nodePortAddresses",
    )  # fmt: skip
    iptables_localhost_nodeports: bool = option(
        "--iptables-localhost-nodeports", flag_types.BOOLEAN, "true", Group.TRAFFIC,
        "Accept NodePort connections on 127.0.0.1, and in modes ebpf, nftables and userspace on ::1. Mode "
        "nftables accepts only TCP there, mode ipvs nothing.",
        fields="iptables.localhostNodePorts",
    )  # fmt: skip
    host_ports: bool = option(
        "--host-ports", flag_types.BOOLEAN, "false", Group.TRAFFIC,
        "Serve hostPort of the pods on this node, for network plugins without the CNI plugin portmap "
        "(ebpfproxy only). The account needs list and watch for pods. A host port without hostIP is served "
        "at the addresses that accept NodePorts.",
    )  # fmt: skip
    feature_gates: tuple[tuple[str, bool], ...] = option(
        "--feature-gates", flag_types.FEATURE_GATES, "", Group.TRAFFIC,
        f"Feature gates of kube-proxy. {EXTERNAL_IPS_GATE}=false: do not serve external IPs. All others have "
        "no effect, and a warning names them. May be repeated.",
        fields="featureGates",
    )  # fmt: skip
    protected_addresses: Protection = option(
        "--protected-addresses", flag_types.PROTECTION, "node", Group.TRAFFIC,
        "Whose addresses external and load balancer IPs of Services cannot take over (ebpfproxy only). node: "
        "those of this node, for ports at which one of its programs listens, and those of the API server. "
        "nodes: also those of other Nodes; every agent then watches all Nodes. none: no check, as in "
        "kube-proxy. An edge never serves the address of a Node.",
    )  # fmt: skip
    external_ip_cidrs: tuple[tuple[str, Network], ...] = option(
        "--external-ip-cidrs", flag_types.NAMESPACE_NETWORKS, "", Group.TRAFFIC,
        "Networks of the external and load balancer IPs that Services of a namespace may have, and * for "
        "every namespace (ebpfproxy only). Other addresses are not served, and the Service gets an Event. "
        "May be repeated. Empty: all addresses.",
    )  # fmt: skip
    lb_algorithm: Algorithm | None = option(
        "--lb-algorithm", flag_types.LB_ALGORITHM, "", Group.TRAFFIC,
        "How an endpoint is selected for a new connection: random, round-robin, source-hash, maglev, "
        "least-connections, or the name of an IPVS scheduler (rr, wrr, lc, wlc, sh, mh) as a synonym "
        "(ebpfproxy only). The annotation ebpfproxy/lb-algorithm of a Service takes precedence. Empty: "
        "random; in mode ipvs, --ipvs-scheduler; in mode userspace, round-robin.",
    )  # fmt: skip
    slow_start: int = option(
        "--slow-start", flag_types.TIMEOUT, "0s", Group.TRAFFIC,
        "Time in which a new endpoint gradually gets its share of new connections (ebpfproxy only). The "
        "annotation ebpfproxy/slow-start of a Service takes precedence. 0: at once.",
    )  # fmt: skip
    removed_endpoints: str = option(
        "--removed-endpoints", flag_types.one_of("keep", "reset"), "keep", Group.TRAFFIC,
        "What happens to open TCP connections to an endpoint that has left its Service or no longer serves "
        "(ebpfproxy only). keep: nothing. reset: they are reset after --removed-endpoints-grace, so that "
        "clients connect again. The annotation ebpfproxy/removed-endpoints of a Service takes precedence. "
        "Mode userspace keeps them.",
    )  # fmt: skip
    removed_endpoints_grace: int = option(
        "--removed-endpoints-grace", flag_types.TIMEOUT, "30s", Group.TRAFFIC,
        "Time from the removal of an endpoint until its connections are reset (ebpfproxy only). At least 1s.",
    )  # fmt: skip
    removed_endpoints_rate: int = option(
        "--removed-endpoints-rate", flag_types.integer(1, 1000000), "100", Group.TRAFFIC,
        "Connections that this node resets per second at most, also for --rebalance (ebpfproxy only).",
    )  # fmt: skip
    rebalance: int = option(
        "--rebalance", flag_types.PERCENTAGE, "0", Group.TRAFFIC,
        "Percentage of this node's open TCP connections to a Service that may be reset per minute after "
        "endpoints were added, so that these get their share (ebpfproxy only). 0: none. The annotation "
        "ebpfproxy/rebalance of a Service takes precedence. Mode userspace resets none.",
    )  # fmt: skip
    conntrack_tcp_timeout_established: int = option(
        "--conntrack-tcp-timeout-established", flag_types.TIMEOUT, "24h", Group.TRAFFIC,
        "Idle timeout of an established TCP connection. 0: 24h in modes ebpf and userspace, the kernel's "
        "value in other modes.",
        fields="conntrack.tcpEstablishedTimeout",
    )  # fmt: skip
    conntrack_tcp_timeout_close_wait: int = option(
        "--conntrack-tcp-timeout-close-wait", flag_types.TIMEOUT, "1h", Group.TRAFFIC,
        "Idle timeout of a TCP connection that one side has closed. 0: 1h in modes ebpf and userspace, the "
        "kernel's value in other modes.",
        fields="conntrack.tcpCloseWaitTimeout",
    )  # fmt: skip
    conntrack_udp_timeout: int = option(
        "--conntrack-udp-timeout", flag_types.TIMEOUT, "0s", Group.TRAFFIC,
        "Idle timeout of an unreplied UDP flow. 0: 30s in modes ebpf and userspace, the kernel's value in "
        "other modes.",
        fields="conntrack.udpTimeout",
    )  # fmt: skip
    conntrack_udp_timeout_stream: int = option(
        "--conntrack-udp-timeout-stream", flag_types.TIMEOUT, "0s", Group.TRAFFIC,
        "Idle timeout of a replied UDP flow. 0: 180s in mode ebpf, the kernel's value in other modes. Mode "
        "userspace has --udp-timeout instead.",
        fields="conntrack.udpStreamTimeout",
    )  # fmt: skip
    sync_period: float = option(
        "--iptables-sync-period --ipvs-sync-period --sync-period", flag_types.duration(zero=False), "30s",
        Group.TRAFFIC,
        "Interval at which the agent compares the kernel with the desired state, after which it repairs "
        "differences. Modes nftables and iptables notice changes earlier, and compare everything hourly. "
        "Must be more than 0.",
        fields="iptables.syncPeriod nftables.syncPeriod ipvs.syncPeriod", zero_is_unset=True,
    )  # fmt: skip
    min_sync_period: float = option(
        "--min-sync-period", flag_types.duration(zero=True), "0s", Group.TRAFFIC,
        "Shortest time between two syncs in any mode (ebpfproxy only). 0: no minimum.",
    )  # fmt: skip

    healthz_bind_address: str | None = option(
        "--healthz-bind-address", flag_types.LISTEN_ADDRESS, None, Group.HTTP,
        'Address of the server for /healthz and /livez. "": no server. Default: 0.0.0.0:10256, or '
        '[::]:10256 if --bind-address is IPv6.',
        fields="healthzBindAddress",
    )  # fmt: skip
    metrics_bind_address: str | None = option(
        "--metrics-bind-address", flag_types.LISTEN_ADDRESS, None, Group.HTTP,
        'Address of the server for /metrics and /proxyMode. "": no server. Default: 127.0.0.1:10249, or '
        '[::1]:10249 if --bind-address is IPv6.',
        fields="metricsBindAddress",
    )  # fmt: skip
    bind_address_hard_fail: bool = option(
        "--bind-address-hard-fail", flag_types.BOOLEAN, "false", Group.HTTP,
        "Exit if an HTTP server cannot listen on its address, instead of retrying every 5 seconds.",
        fields="bindAddressHardFail",
    )  # fmt: skip
    profiling: bool = option(
        "--profiling", flag_types.BOOLEAN, "false", Group.HTTP,
        "Serve /debug/flags/v on the metrics server: PUT sets the log level until the agent ends. Unlike "
        "kube-proxy, the agent has no /debug/pprof.",
        fields="enableProfiling",
    )  # fmt: skip
    healthz_port: int = option(
        "--healthz-port", flag_types.PORT, str(HEALTHZ_PORT), Group.HTTP,
        "Deprecated. Port for a --healthz-bind-address without a port. 0: no server.",
    )  # fmt: skip
    metrics_port: int = option(
        "--metrics-port", flag_types.PORT, str(METRICS_PORT), Group.HTTP,
        "Deprecated. Port for a --metrics-bind-address without a port. 0: no server.",
    )  # fmt: skip

    oom_score_adj: int = option(
        "--oom-score-adj", flag_types.integer(-1000, 1000), "-999", Group.PROCESS,
        "OOM score adjustment of the agent, from -1000 (never killed) to 1000 (killed first).",
        fields="oomScoreAdj",
    )  # fmt: skip
    verbosity: int = option(
        "-v --v", flag_types.integer(0, 100), "0", Group.PROCESS,
        "Log level, 0 to 100. From 4 on, the agent logs every decision, and tracebacks.",
        fields="logging.verbosity", over_file=True,
    )  # fmt: skip
    logging_format: str = option(
        "--logging-format", flag_types.one_of("text", "json"), "text", Group.PROCESS,
        "Format of log lines.",
        fields="logging.format", over_file=True,
    )  # fmt: skip
    cleanup: bool = option(
        "--cleanup", flag_types.BOOLEAN, "false", Group.PROCESS,
        "Remove everything that ebpfproxy or kube-proxy created in this node's kernel, then exit.",
    )  # fmt: skip
    init_only: bool = option(
        "--init-only", flag_types.BOOLEAN, "false", Group.PROCESS,
        "Prepare this node's kernel for the selected proxy mode, then exit: sysctls, mounts, and the "
        "programs or tables of the mode, without Services. No API server is needed. A later run needs the "
        "same privileges, unlike that of kube-proxy.",
    )  # fmt: skip

    @classmethod
    def parse(
        cls, texts: Mapping[str, Any], labels: Mapping[str, str] | None = None, problems: Iterable[str] = ()
    ) -> "Config":
        """Parse the texts of options, by option name; None for an option that is not given.

        `labels` are the names of options in errors, by option name; the default is the flag.
        Raises one ConfigError with a line for each invalid option and for each of `problems`.
        """
        label = _labeller(labels or {})
        values, invalid = _parse(texts, OPTIONS, label)
        errors = [*problems, *invalid]
        if not errors:
            config = cls(**values)
            errors = list(config._conflicts(label))
            if not errors:
                return config
        raise _rejection(errors)

    def _conflicts(self, label: "_Label") -> Iterator[str]:
        """Yield an error for each conflict between options that are valid alone."""
        for name in "min_sync_period", *_MIN_SYNC_PERIODS[self.proxy_mode]:
            minimum = getattr(self, name)
            if self.sync_period < minimum != OPTIONS[name].parse(None):  # the default is no conflict
                longest = f"{label('sync_period')} ({self.sync_period:g}s)"
                yield f"{label(name)}: must not be longer than {longest}"
        if self.manifests and (self.kubeconfig or self.master):
            given = "kubeconfig" if self.kubeconfig else "master"
            yield f"{label('manifests')}: replaces the API server; leave {label(given)} out"
        if self.ebpf_xdp != "off" and not self.ebpf_redirect:
            needed = label("ebpf_redirect")
            yield f"{label('ebpf_xdp')}: needs {needed}, since XDP only forwards flows that bypass the stack"
        interface = POD_INTERFACES.get(self.detect_local_mode)
        if interface and not self.pod_interface:
            mode = self.detect_local_mode.value
            yield f"{label(interface)}: must be set for local traffic detection {mode}"
        if self.role is Role.EDGE:
            yield from self._edge_conflicts(label)
        yield from self._direct_return_conflicts(label)

    def _edge_conflicts(self, label: "_Label") -> Iterator[str]:
        if self.proxy_mode not in ("auto", "ebpf"):
            yield f"{label('role')}: edge needs mode ebpf, not {self.proxy_mode}"
        if self.host_ports:
            yield f"{label('host_ports')}: an edge has no pods; leave it out"
        if self.tc_devices == NO_DEVICES:
            yield f"{label('role')}: edge needs network devices; do not set {label('tc_devices')} to none"

    def _direct_return_conflicts(self, label: "_Label") -> Iterator[str]:
        port = label("ebpf_dsr_port")
        if self.ebpf_dsr_port and self.tc_devices == NO_DEVICES:
            yield f"{port}: needs network devices; do not set {label('tc_devices')} to none"
        elif not self.ebpf_dsr_port and self.ebpf_forwarding is EbpfForwarding.DSR:
            yield f"{label('ebpf_forwarding')}: dsr needs a UDP port for tunnels; set {port}, such as 6083"

    @property
    def node_name(self) -> str:
        """The name of this node's Node object, in lower case, as all names of Nodes are.

        Raises ConfigError if the host has no name.
        """
        name = (self.hostname_override or os.uname().nodename).strip().lower()
        if not name:
            raise ConfigError(
                "cannot determine the node name: the host has no name",
                "give the name of this node's Node object with --hostname-override",
            )
        return name

    @property
    def allow_external_ips(self) -> bool:
        """Whether the external IPs of Services are served."""
        return dict(self.feature_gates).get(EXTERNAL_IPS_GATE, True)

    @property
    def node_port_cidrs(self) -> tuple[Network, ...]:
        """The networks of --nodeport-addresses. Empty: every local address, or the primary ones."""
        return self.nodeport_addresses.networks

    @property
    def node_port_primary(self) -> bool:
        """Whether NodePorts answer on the primary address of each family."""
        return self.nodeport_addresses.primary

    @property
    def healthz_listen(self) -> tuple[str, int] | None:
        """Address and port for /healthz; None without a server."""
        any_address = format_address(unspecified(family(self.bind_address)))
        return _listen(self.healthz_bind_address, any_address, self.healthz_port)

    @property
    def metrics_listen(self) -> tuple[str, int] | None:
        """Address and port for /metrics; None without a server."""
        loopback = "127.0.0.1" if family(self.bind_address) is Family.IPV4 else "::1"
        return _listen(self.metrics_bind_address, loopback, self.metrics_port)


def _listen(text: str | None, default: str, port: int) -> tuple[str, int] | None:
    """Return address and port of a server; None for port 0 or the address "".

    This is kube-proxy's addressFromDeprecatedFlags.
    """
    if text == "" or port == 0:
        return None
    return flag_types.split_listen_address(default if text is None else text, port)


OPTIONS: Mapping[str, Option] = declared_by(Config)

OF_MODES = tuple(
    name for name, each in OPTIONS.items() if any(field.partition(".")[0] in MODES for field in each.fields)
)
"""The options with fields in the sections of modes. A change of the mode may change their values."""

_Label = Callable[[str], str]


def parse_some(texts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Parse only these options, for a command that needs no others. Errors name flags.

    Raises one ConfigError with a line for each invalid option.
    """
    values, errors = _parse(texts, {name: OPTIONS[name] for name in names}, _labeller({}))
    if errors:
        raise _rejection(errors)
    return values


def _labeller(labels: Mapping[str, str]) -> "_Label":
    return lambda name: labels.get(name, OPTIONS[name].flag)


def _parse(
    texts: Mapping[str, Any], declared: Mapping[str, Option], label: "_Label"
) -> tuple[dict[str, Any], list[str]]:
    """Return the values, and an error for each invalid option."""
    values: dict[str, Any] = {}
    errors: list[str] = []
    for name, each in declared.items():
        try:
            values[name] = each.parse(texts.get(name))
        except ValueError as error:
            errors.append(f"{label(name)}: {error}")
    return values, errors


def _rejection(errors: list[str]) -> ConfigError:
    return ConfigError("\n".join(errors))
