"""Captured kernel state of kube-proxy 1.30 (captured/README.md).

The addresses of its node and endpoints are replaced by those of a lab, so that its rules work there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ebpfproxy.api.parse import parse_manifest_object
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.lab import Lab, Pod
from ebpfproxy.lab.manifests import Object
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext, ServicePortPlan

CAPTURED = Path(__file__).with_name("captured")
KUBELETS = frozenset({"KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})
DELETED = frozenset({"sticky", "empty", "external-ip"})
"""Services of the captured rules that `objects` omits, as if they were deleted while no proxy ran."""

_KUBELETS_CHAINS = """\
*filter
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
"""


def replacements(lab: Lab, first: Pod, second: Pod, third: Pod) -> dict[str, str]:
    """The lab's addresses by captured address. `first` and `second` are the endpoints of every Service with
    two, `second` is the endpoint of `ranges`, and `third` the last endpoint of `web`."""
    captured = {
        lab.node: ("172.30.0.11", "fd00:30::b"),
        first: ("10.244.1.11", "fd00:10:244:1::b"),
        second: ("10.244.2.11", "fd00:10:244:2::b"),
        third: ("10.244.1.12", "fd00:10:244:1::c"),
    }
    found = {address: pod.v4 for pod, (address, _) in captured.items()}
    found |= {address: pod.v6 for pod, (_, address) in captured.items()}
    networks = zip(("10.244.0.0/16", "fd00:10:244::/56"), lab.addresses.all_pods, strict=True)
    return found | dict(networks) | {"node1": lab.node_name}


def objects(instead: Mapping[str, str]) -> list[Object]:
    """Services and EndpointSlices, without DELETED."""
    found: list[Object] = []
    for kind, version, file in (
        ("Service", "v1", "services.json"),
        ("EndpointSlice", "discovery.k8s.io/v1", "endpointslices.json"),
    ):
        for each in json.loads(_text(file, instead))["items"]:
            metadata = each["metadata"]
            service = metadata.get("labels", {}).get("kubernetes.io/service-name", metadata["name"])
            if service not in DELETED:
                found.append({"kind": kind, "apiVersion": version} | each)
    return found


def iptables_text(of: Family, instead: Mapping[str, str]) -> str:
    """Input for iptables-restore, with the kubelet's chains."""
    stem = "iptables" if of is Family.IPV4 else "ip6tables"
    return _KUBELETS_CHAINS + _text(f"{stem}-save.txt", instead)


def nftables_text(instead: Mapping[str, str]) -> str:
    """Input for nft: the tables of both families."""
    return _text("nft.txt", instead)


def _text(file: str, instead: Mapping[str, str]) -> str:
    any_of = "|".join(map(re.escape, sorted(instead, key=len, reverse=True)))
    return re.sub(
        rf"(?<![\w.:])(?:{any_of})(?![\w.]|:[0-9a-f]*:)",
        lambda found: instead[found[0]],
        (CAPTURED / file).read_text(),
    )


def plans_of(services: Sequence[Object], node: str, pods: Sequence[str]) -> list[ServicePortPlan]:
    """The plans for these objects as on kube-proxy's node; `pods`: the cluster's CIDRs."""
    tracker = Tracker(started=0.0)
    for each in services:
        for event in parse_manifest_object(json.dumps(each).encode(), node):
            tracker.fold(event)
    state = tracker.drain().state
    cidrs = tuple(map(parse_network, pods))
    context = PlanContext(node, detect_local=DetectLocal.CLUSTER_CIDR, cluster_cidrs=cidrs)
    return [
        plan
        for service in state.services.values()
        for plan in plan_service(service, state.slices_of(service.name), None, context)
    ]
