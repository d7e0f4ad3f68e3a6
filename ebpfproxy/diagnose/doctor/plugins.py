"""The network plugins of a node, recognized by their traces.

Names of 2026. flannel: pkg/trafficmngr of flannel-io/flannel. Calico: felix/dataplane/linux,
felix/rules/rule_defs.go, felix/bpf-gpl/connect_balancer.c and felix/bpf/tc/attach.go of projectcalico/calico.
Cilium: pkg/datapath/iptables and bpf/bpf_sock.c of cilium/cilium. Amazon: pkg/networkutils/network.go of
aws/amazon-vpc-cni-k8s. kindnet: images/kindnetd of kubernetes-sigs/kind; pkg/masq and cmd/cni-kindnet of
aojea/kindnet. kube-router: pkg/controllers of cloudnativelabs/kube-router.
"""

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.diagnose.doctor.traces import CGROUP, CGROUP_PROGRAMS, DEVICE_PROGRAMS, Traces

_MAX_SHOWN = 5


class Plugin(enum.StrEnum):
    FLANNEL = "flannel"
    CALICO = "Calico"
    CILIUM = "Cilium"
    AWS = "Amazon VPC CNI"
    KINDNET = "kindnet"
    KUBE_ROUTER = "kube-router"


class Dataplane(enum.StrEnum):
    """How a plugin forwards packets. `UNKNOWN`: programs cannot be read, or there is one way
    only."""

    UNKNOWN = ""
    IPTABLES = "iptables"
    NFTABLES = "nftables"
    EBPF = "eBPF"
    REPLACES = "with kube-proxy replacement"
    WITHOUT = "without kube-proxy replacement"


class Found(NamedTuple):
    """A plugin of this node.

    - `traces`: what it was recognized by, sorted by kind.
    - `chains`: those of iptables.
    - `connects_pods`: it has a CNI file; if no plugin has one, it has devices. Others may only enforce
      network policies, or are remains.
    """

    plugin: Plugin
    dataplane: Dataplane
    traces: tuple[str, ...]
    chains: tuple[str, ...]
    connects_pods: bool

    @property
    def title(self) -> str:
        return f"{self.plugin} ({self.dataplane})" if self.dataplane else str(self.plugin)


class _Signature(NamedTuple):
    """Names that only this plugin uses. `types` are of CNI executables, `networks` names in CNI files, the
    others are regular expressions for complete names."""

    types: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()
    devices: str = ""
    chains: str = ""
    tables: str = ""
    programs: str = ""


_SIGNATURES = {
    Plugin.FLANNEL: _Signature(
        types=frozenset({"flannel"}),
        devices=r"flannel(?:-v6)?\.\d+|flannel-wg(?:-v6)?",
        chains=r"FLANNEL-(?:POSTRTG|FWD)",
        tables=r"flannel-ipv[46]",
    ),
    Plugin.CALICO: _Signature(
        types=frozenset({"calico"}),
        devices=r"cali[0-9a-f]{11}|vxlan(?:-v6)?\.calico|wireguard\.cali|wg-v6\.cali|bpf(?:in|out)\.cali",
        chains=r"cali-.+",
        tables=r"calico",
        programs=r"cali_.+|calico_.+",
    ),
    Plugin.CILIUM: _Signature(
        types=frozenset({"cilium-cni"}),
        devices=r"cilium_.+|lxc_health",
        chains=r"(?:OLD_)?CILIUM_.+",
        programs=r"cil_.+",
    ),
    Plugin.AWS: _Signature(
        types=frozenset({"aws-cni"}),
        devices=r"eni[0-9a-f]{11}",
        chains=r"AWS-(?:SNAT|CONNMARK)-CHAIN-\d+",
    ),
    Plugin.KINDNET: _Signature(
        types=frozenset({"cni-kindnet"}),
        networks=frozenset({"kindnet"}),
        devices=r"knet[0-9a-f]{8,}",
        chains=r"KIND-MASQ-AGENT",
        tables=r"kindnet-.+|cni-kindnet",
    ),
    Plugin.KUBE_ROUTER: _Signature(
        devices=r"kube-bridge|kube-dummy-if",
        chains=r"KUBE-ROUTER-.+",
        tables=r"kube-router-filter-ipv[46]",
    ),
}


def find(traces: Traces) -> tuple[Found, ...]:
    """The plugins with traces on this node, in the order of `Plugin`. Empty if there are none.

    Several are usual: Calico's network policies beside another plugin, or remains of a previous one.
    """
    has_files = any(_files(plugin, traces) for plugin in Plugin)
    return tuple(each for plugin in Plugin if (each := _found(plugin, traces, has_files)))


def _files(plugin: Plugin, traces: Traces) -> tuple[str, ...]:
    signature = _SIGNATURES[plugin]
    return tuple(
        str(each.path)
        for each in traces.cni
        if each.network in signature.networks or signature.types & set(each.types)
    )


def _found(plugin: Plugin, traces: Traces, has_files: bool) -> Found | None:
    """`has_files`: whether any plugin has a CNI file."""
    signature = _SIGNATURES[plugin]
    files = _files(plugin, traces)
    devices = _matching(signature.devices, traces.devices)
    chains = _matching(signature.chains, traces.chains)
    found = (
        *files,
        *shown(devices, "device"),
        *shown(chains, "chain"),
        *shown(_matching(signature.tables, traces.tables), "table"),
        *shown(_matching(signature.programs, {each.name for each in traces.programs}), "program"),
    )
    if not found:
        return None
    return Found(plugin, _dataplane(plugin, traces), found, chains, bool(files if has_files else devices))


def _matching(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if pattern and re.fullmatch(pattern, name)))


def shown(names: Sequence[str], kind: str = "") -> Iterator[str]:
    """The first names, each after its kind, and how many there are beyond.

    >>> list(shown("abcdefg", "device"))
    ['device a', 'device b', 'device c', 'device d', 'device e', '2 more']
    """
    yield from (f"{kind} {name}".lstrip() for name in names[:_MAX_SHOWN])
    if len(names) > _MAX_SHOWN:
        yield f"{len(names) - _MAX_SHOWN} more"


def _dataplane(plugin: Plugin, traces: Traces) -> Dataplane:
    if plugin not in _TRANSLATING:
        return Dataplane.UNKNOWN
    is_calico = plugin is Plugin.CALICO
    if translating_programs(plugin, traces) or (is_calico and "bpfin.cali" in traces.devices):
        return Dataplane.EBPF if is_calico else Dataplane.REPLACES
    if {CGROUP_PROGRAMS, DEVICE_PROGRAMS} & traces.unread.keys():
        return Dataplane.UNKNOWN
    if is_calico:
        return Dataplane.NFTABLES if "calico" in traces.tables else Dataplane.IPTABLES
    return Dataplane.WITHOUT


_TRANSLATING = {Plugin.CALICO: r"cali_tc_.+|calico_connect_.+", Plugin.CILIUM: r"cil_sock[46]_conn.*"}
"""Programs that translate addresses of Services, by name. Cilium without kube-proxy replacement also has
programs at devices. Calico has programs at devices only in its eBPF dataplane."""


def translating_programs(plugin: Plugin, traces: Traces) -> tuple[str, ...]:
    """The attached programs with which a plugin replaces kube-proxy, with their place. Empty if it does
    not."""
    pattern = _TRANSLATING.get(plugin, "")
    found = (each for each in traces.programs if pattern and re.fullmatch(pattern, each.name))
    return tuple(
        dict.fromkeys(
            f"{each.name} at {'the root of cgroup v2' if each.place == CGROUP else each.place}"
            for each in found
        )
    )
