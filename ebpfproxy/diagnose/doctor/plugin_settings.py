"""What to set for the network plugins of this node, compared with the agent's configuration.

Mode ebpf detects local traffic by devices and uses no packet marks, so that only --ebpf-redirect depends on
the plugin. The other modes need local traffic detection that fits the plugin, and a bit of the packet mark
that the plugin does not use.
"""

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.config import Config
from ebpfproxy.diagnose.doctor.check import NODE, Check, State
from ebpfproxy.diagnose.doctor.links import Page
from ebpfproxy.diagnose.doctor.plugins import Found, Plugin
from ebpfproxy.diagnose.doctor.traces import Traces
from ebpfproxy.plan.service_plan import DetectLocal

LOCAL_TRAFFIC = "local traffic detection"
MASQUERADE_BIT = "masquerade bit"
REDIRECT = "network plugin for --ebpf-redirect"

_EBPF = "ebpf"
_ALL_BITS = 0xFFFFFFFF
_FREE_FIRST = (14, 13, 12, *range(16, 32), *range(12))
"""Bits to propose, best first. 14 is the default; 15 is that of the kubelet's KUBE-MARK-DROP."""
_SET_MARK = re.compile(r"--set-x?mark (0x[0-9a-f]+|\d+)(?:/(0x[0-9a-f]+|\d+))?")


class _Pods(NamedTuple):
    """How pods of a plugin are recognized. `name`: of the bridge, or the prefix of devices."""

    mode: DetectLocal
    name: str = ""

    @property
    def flags(self) -> str:
        match self.mode:
            case DetectLocal.BRIDGE_INTERFACE:
                name = f" --pod-bridge-interface={self.name}"
            case DetectLocal.INTERFACE_NAME_PREFIX:
                name = f" --pod-interface-name-prefix={self.name}"
            case _:
                name = ""
        return f"--detect-local-mode={self.mode.value}{name}"


_PODS = {
    Plugin.FLANNEL: _Pods(DetectLocal.NODE_CIDR),
    Plugin.CALICO: _Pods(DetectLocal.INTERFACE_NAME_PREFIX, "cali"),
    Plugin.CILIUM: _Pods(DetectLocal.INTERFACE_NAME_PREFIX, "lxc"),
    Plugin.AWS: _Pods(DetectLocal.INTERFACE_NAME_PREFIX, "eni"),
    Plugin.KINDNET: _Pods(DetectLocal.NODE_CIDR),
    Plugin.KUBE_ROUTER: _Pods(DetectLocal.NODE_CIDR),
}
"""flannel, kindnet and kube-router give pods addresses of the Node's podCIDRs. The others have own
addresses by default, and a device for each pod."""

_MARKS = {
    Plugin.CALICO: 0xFFFF0000,  # IptablesMarkMask in felix/config/config_params.go, for all dataplanes
    # MARK_MAGIC_HOST_MASK and the bits of an identity in bpf/lib/common.h. With IPsec also 0xf000.
    Plugin.CILIUM: 0xFFFF0FFF,
    Plugin.AWS: 0x80,  # defaultConnmark in pkg/networkutils/network.go
}
"""Bits of the packet mark that plugins use by default. Those in their rules are added."""


def checks(found: Sequence[Found], traces: Traces, config: Config, mode: str | None) -> Iterator[Check]:
    """`mode`: the selected one; None yields nothing, since the settings depend on it."""
    if mode == _EBPF:
        if config.ebpf_redirect:
            yield _redirect(found)
    elif mode:
        yield _local_traffic(found, config)
        if used := {each: mark for each in found if (mark := mark_bits(each, traces))}:
            yield _masquerade_bit(used, config.iptables_masquerade_bit)


def advice(found: Found, mode: str) -> str:
    """What to set for this plugin in a mode."""
    if mode == _EBPF or not found.connects_pods:
        return f"in mode {mode}: nothing to set"
    return f"in mode {mode}: {_PODS[found.plugin].flags}, or --cluster-cidr with the CIDR of all pods"


def mark_bits(found: Found, traces: Traces) -> int:
    """The bits of the packet mark that the plugin uses: by default, and in its rules of iptables."""
    marks = (
        _mask(match) for name in found.chains for rule in traces.chains[name] for match in _marks_set(rule)
    )
    return functools.reduce(operator.or_, marks, _MARKS.get(found.plugin, 0))


def _marks_set(rule: str) -> Iterable[re.Match[str]]:
    return _SET_MARK.finditer(rule)


def _mask(match: re.Match[str]) -> int:
    """A rule without a mask, or that clears or sets all bits, restores a mark: it says nothing of bits."""
    mask = int(match[2], 0) if match[2] else int(match[1], 0)
    return 0 if mask == _ALL_BITS else mask


def _redirect(found: Sequence[Found]) -> Check:
    """flannel's rules only accept what is forwarded. The others have network policies or connection marks."""
    relying = [each.title for each in found if each.plugin is not Plugin.FLANNEL]
    if not relying:
        return Check(NODE, REDIRECT, State.PRESENT, "", "", Page.REDIRECT)
    return Check(
        NODE,
        REDIRECT,
        State.REQUIRED,
        f"flows of outside clients skip rules or programs of {', '.join(relying)}",
        "remove --ebpf-redirect",
        Page.REDIRECT,
    )


def _local_traffic(found: Sequence[Found], config: Config) -> Check:
    found = [each for each in found if each.connects_pods] or found
    problem = _local_traffic_problem(found, config)
    if not problem:
        return Check(NODE, LOCAL_TRAFFIC, State.PRESENT, "", "", Page.PLUGINS)
    proposals = dict.fromkeys(_PODS[each.plugin].flags for each in found)
    remedy = " or ".join(f"set {flags}" for flags in proposals) or "set --detect-local-mode for your plugin"
    return Check(
        NODE,
        LOCAL_TRAFFIC,
        State.OPTIONAL,
        problem,
        f"{remedy}; or set --cluster-cidr to the CIDR of all pods",
        Page.PLUGINS,
    )


def _local_traffic_problem(found: Sequence[Found], config: Config) -> str:
    """Why the configured detection does not fit; "" if it does, as far as it is known."""
    mode, expected = config.detect_local_mode, [_PODS[each.plugin] for each in found]
    match mode:
        case DetectLocal.CLUSTER_CIDR if not config.cluster_cidr:
            return "no traffic counts as local without --cluster-cidr"
        case DetectLocal.NODE_CIDR if expected and all(each.mode is not mode for each in expected):
            return f"{found[0].title} may give pods addresses outside of the Node's podCIDRs"
        case DetectLocal.INTERFACE_NAME_PREFIX:
            names = [each.name for each in expected if each.mode is mode]
            if names and len(names) == len(expected) and config.pod_interface not in names:
                return f"{found[0].title} has pod devices {names[0]}*, not {config.pod_interface}*"
    return ""


def _masquerade_bit(used: dict[Found, int], bit: int) -> Check:
    mark = 1 << bit
    colliding = [each.title for each, bits in used.items() if bits & mark]
    if not colliding:
        return Check(NODE, MASQUERADE_BIT, State.PRESENT, "", "", Page.MASQUERADE_BIT)
    taken = functools.reduce(operator.or_, used.values())
    free = next((each for each in _FREE_FIRST if not taken & 1 << each), None)
    remedy = "set another --iptables-masquerade-bit, and change the plugin's marks"
    if free is not None:
        remedy = f"set --iptables-masquerade-bit={free}"
    return Check(
        NODE,
        MASQUERADE_BIT,
        State.REQUIRED,
        f"{', '.join(colliding)} uses bit {bit} of the packet mark, too ({mark:#x})",
        remedy,
        Page.MASQUERADE_BIT,
    )
