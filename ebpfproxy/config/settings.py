"""`Config`: every option of ebpfproxy, each declared once, here and in the parts that `Config` is made of.

Names, meaning and defaults of flags that kube-proxy has are kube-proxy's (cmd/kube-proxy/app/options.go),
so that the arguments of a DaemonSet carry over, and so are the fields of its configuration file
(staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go); options of our own say so in their help.
"""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ebpfproxy.config import flag_types
from ebpfproxy.config.ebpf_options import EbpfOptions
from ebpfproxy.config.flag_types import NodePortAddresses
from ebpfproxy.config.ipvs_options import IpvsOptions
from ebpfproxy.config.netfilter_options import POD_INTERFACES, NetfilterOptions
from ebpfproxy.config.option import Group, Option, declared_by, option
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import Address, Family, Network, family, format_address, unspecified

HEALTHZ_PORT, METRICS_PORT = 10256, 10249

MODES = ("auto", "ebpf", "nftables", "iptables", "ipvs")
NOT_BUILT_IN = frozenset({"userspace"})
_MODE = flag_types.one_of(*MODES)
_OF_NETFILTER, _OF_IPVS = "iptables_min_sync_period", "ipvs_min_sync_period"
_LEAST_OF = {
    "auto": (_OF_NETFILTER,),
    "ebpf": (),
    "nftables": (_OF_NETFILTER,),
    "iptables": (_OF_NETFILTER,),
    "ipvs": (_OF_IPVS,),
}
"""By mode: which least times between two syncs must not be longer than --sync-period, beside
--min-sync-period. As in kube-proxy, auto does not look at what is ipvs' alone."""


def _parse_mode(text: str) -> str:
    if text in NOT_BUILT_IN:
        raise ValueError(f'"{text}" is not built in this version yet')
    return str(_MODE.parse(text))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EbpfOptions, NetfilterOptions, IpvsOptions):
    """Durations are in seconds. A path that is None stands for an option not given."""

    config: Path | None = option(
        "--config", flag_types.PATH, "", Group.FILE,
        "KubeProxyConfiguration file, YAML or JSON. Flags that have a field in it are then ignored, "
        "except --hostname-override, --v and --logging-format. A changed file is loaded again.",
    )  # fmt: skip
    write_config_to: Path | None = option(
        "--write-config-to", flag_types.PATH, "", Group.FILE,
        "Write the effective configuration to this file as a KubeProxyConfiguration, then exit.",
    )  # fmt: skip

    kubeconfig: Path | None = option(
        "--kubeconfig", flag_types.PATH, "", Group.CLUSTER,
        "Kubeconfig file for the API server. Default without --master: the pod's ServiceAccount.",
        fields="clientConnection.kubeconfig",
    )  # fmt: skip
    master: str = option(
        "--master", flag_types.TEXT, "", Group.CLUSTER,
        "URL of the API server. Overrides the URL in the kubeconfig.",
    )  # fmt: skip
    manifests: Path | None = option(
        "--manifests", flag_types.DIRECTORY, "", Group.CLUSTER,
        "Read Services, EndpointSlices and Nodes from the YAML and JSON files in this directory instead "
        "of the API server, and follow changes (ebpfproxy only).",
    )  # fmt: skip
    hostname_override: str = option(
        "--hostname-override", flag_types.NODE_NAME, "", Group.CLUSTER,
        "Name of this node's Node object. Default: the host name.",
        fields="hostnameOverride", over_file=True,
    )  # fmt: skip

    proxy_mode: str = option(
        "--proxy-mode", flag_types.Kind(_MODE.metavar, _parse_mode), "auto", Group.TRAFFIC,
        "Proxy mode. auto: the first of the others that works on this node.",
        fields="mode",
    )  # fmt: skip
    bind_address: Address = option(
        "--bind-address", flag_types.IP, "0.0.0.0", Group.TRAFFIC,
        "No server listens on it. Its family is the default family of the HTTP servers. A specific "
        "address is this node's primary address for --nodeport-addresses=primary.",
        fields="bindAddress",
    )  # fmt: skip
    masquerade_all: bool = option(
        "--masquerade-all", flag_types.BOOLEAN, "false", Group.TRAFFIC,
        "Masquerade every packet sent to a ClusterIP. Has no effect on sockets that are redirected at "
        "connect(), since they send no such packets.",
        fields="iptables.masqueradeAll nftables.masqueradeAll", zero_is_unset=True,
    )  # fmt: skip
    nodeport_addresses: NodePortAddresses = option(
        "--nodeport-addresses", flag_types.NODE_PORT_ADDRESSES, "", Group.TRAFFIC,
        "Accept NodePort connections only on node addresses in these networks. primary: on the first "
        "address of each family of the Node object. localhost: on loopback. May be repeated. Default: all "
        "addresses.",
        fields="nodePortAddresses",
    )  # fmt: skip
    iptables_localhost_nodeports: bool = option(
        "--iptables-localhost-nodeports", flag_types.BOOLEAN, "true", Group.TRAFFIC,
        "Accept NodePort connections on 127.0.0.1, in every mode that supports it.",
        fields="iptables.localhostNodePorts",
    )  # fmt: skip
    conntrack_tcp_timeout_established: int = option(
        "--conntrack-tcp-timeout-established", flag_types.TIMEOUT, "24h", Group.TRAFFIC,
        "Idle timeout of an established TCP connection. 0: 24h in mode ebpf, the kernel's value in other "
        "modes.",
        fields="conntrack.tcpEstablishedTimeout",
    )  # fmt: skip
    conntrack_tcp_timeout_close_wait: int = option(
        "--conntrack-tcp-timeout-close-wait", flag_types.TIMEOUT, "1h", Group.TRAFFIC,
        "Idle timeout of a TCP connection that one side has closed. 0: 1h in mode ebpf, the kernel's "
        "value in other modes.",
        fields="conntrack.tcpCloseWaitTimeout",
    )  # fmt: skip
    conntrack_udp_timeout: int = option(
        "--conntrack-udp-timeout", flag_types.TIMEOUT, "0s", Group.TRAFFIC,
        "Idle timeout of an unreplied UDP flow. 0: 30s in mode ebpf, the kernel's value in other modes.",
        fields="conntrack.udpTimeout",
    )  # fmt: skip
    conntrack_udp_timeout_stream: int = option(
        "--conntrack-udp-timeout-stream", flag_types.TIMEOUT, "0s", Group.TRAFFIC,
        "Idle timeout of a replied UDP flow. 0: 180s in mode ebpf, the kernel's value in other modes.",
        fields="conntrack.udpStreamTimeout",
    )  # fmt: skip
    sync_period: float = option(
        "--iptables-sync-period --ipvs-sync-period --sync-period", flag_types.duration(zero=False), "30s",
        Group.TRAFFIC,
        "How often the kernel state is read back, compared with the desired state, and repaired.",
        fields="iptables.syncPeriod nftables.syncPeriod ipvs.syncPeriod", zero_is_unset=True,
    )  # fmt: skip
    min_sync_period: float = option(
        "--min-sync-period", flag_types.duration(zero=True), "0s", Group.TRAFFIC,
        "Shortest time between two syncs (ebpfproxy only).",
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
    healthz_port: int = option(
        "--healthz-port", flag_types.PORT, str(HEALTHZ_PORT), Group.HTTP,
        "Deprecated: port for a --healthz-bind-address without one. 0: no server.",
    )  # fmt: skip
    metrics_port: int = option(
        "--metrics-port", flag_types.PORT, str(METRICS_PORT), Group.HTTP,
        "Deprecated: port for a --metrics-bind-address without one. 0: no server.",
    )  # fmt: skip

    oom_score_adj: int = option(
        "--oom-score-adj", flag_types.integer(-1000, 1000), "-999", Group.PROCESS,
        "OOM score adjustment of the agent, from -1000 (never killed) to 1000.",
        fields="oomScoreAdj",
    )  # fmt: skip
    verbosity: int = option(
        "-v --v", flag_types.integer(0, 100), "0", Group.PROCESS,
        "Log level. 4 or more logs every decision, and tracebacks.",
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

    @classmethod
    def parse(
        cls, texts: Mapping[str, Any], labels: Mapping[str, str] | None = None, problems: Iterable[str] = ()
    ) -> "Config":
        """The configuration that these texts, by the names of options, make; None for one not given.

        `labels`: what to call options in errors, by their names; by their flags, where there is none.
        Raises one ConfigError that has a line for each option that is wrong, and for each of `problems`.
        """
        label = _labeller(labels or {})
        values, found = _parse(texts, OPTIONS, label)
        found = [*problems, *found]
        if not found:
            config = cls(**values)
            found = list(config._conflicts(label))
            if not found:
                return config
        raise _rejection(found, texts)

    def _conflicts(self, label: "_Label") -> Iterator[str]:
        """What is wrong between options that are right alone."""
        for name in "min_sync_period", *_LEAST_OF[self.proxy_mode]:
            least = getattr(self, name)
            if self.sync_period < least != OPTIONS[name].parse(None):  # the default gives way
                yield f"{label(name)}: is longer than {label('sync_period')} ({self.sync_period:g}s)"
        if self.manifests and (self.kubeconfig or self.master):
            given = "kubeconfig" if self.kubeconfig else "master"
            yield f"{label('manifests')}: stands in for an API server, so leave {label(given)} out"
        needed = POD_INTERFACES.get(self.detect_local_mode)
        if needed and not self.pod_interface:
            yield f"{label(needed)}: is needed for local traffic detection by {self.detect_local_mode.value}"

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
    return flag_types.split_listen_address(default if text is None else text, port)


OPTIONS: Mapping[str, Option] = declared_by(Config)

OF_MODES = tuple(
    name for name, each in OPTIONS.items() if any(field.partition(".")[0] in MODES for field in each.fields)
)
"""The options that a configuration file has in sections of modes: with the mode, they may change."""

_Label = Callable[[str], str]


def parse_some(texts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The values of a few options alone, by their flags, for a command that needs no more.

    Raises one ConfigError that has a line for each option that is wrong.
    """
    values, problems = _parse(texts, {name: OPTIONS[name] for name in names}, _labeller({}))
    if problems:
        raise _rejection(problems, texts)
    return values


def _labeller(labels: Mapping[str, str]) -> "_Label":
    return lambda name: labels.get(name, OPTIONS[name].flag)


def _parse(
    texts: Mapping[str, Any], declared: Mapping[str, Option], label: "_Label"
) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, each in declared.items():
        try:
            values[name] = each.parse(texts.get(name))
        except ValueError as error:
            problems.append(f"{label(name)}: {error}")
    return values, problems


def _rejection(problems: list[str], texts: Mapping[str, Any]) -> ConfigError:
    hint = ""
    if texts.get("proxy_mode") in NOT_BUILT_IN:
        hint = f"this version has {', '.join(MODES[1:])}; auto takes the first of them that works here"
    return ConfigError("\n".join(problems), hint)
