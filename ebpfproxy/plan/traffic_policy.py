"""Traffic policies: what happens to a new connection, by the kind of its frontend and by its client.

| frontend, policy | from a pod | from this node | from outside |
|---|---|---|---|
| ClusterIP, internal Cluster | CLUSTER | CLUSTER, masqueraded | CLUSTER, masqueraded |
| ClusterIP, internal Local | LOCAL | LOCAL, masqueraded | LOCAL, masqueraded |
| other, external Cluster | CLUSTER, masqueraded | CLUSTER, masqueraded | CLUSTER, masqueraded |
| other, external Local | CLUSTER | CLUSTER, masqueraded | LOCAL |

"Other" frontends are NodePorts, external IPs and load balancer IPs. CLUSTER and LOCAL are scopes, which
`endpoints.py` resolves to endpoints: with scope LOCAL, terminating endpoints on this node are used if none of
its endpoints is ready. The columns are for a node with local traffic detection; the functions below describe
--masquerade-all and a node without detection.

The rows are those that kube-proxy writes in modes iptables and nftables as chains KUBE-SVC, KUBE-SVL and
KUBE-EXT (syncProxyRules in pkg/proxy/iptables/proxier.go).
"""

import functools
from typing import NamedTuple

from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.service_plan import PlanContext, PolicyResult, Scope


class PolicyResults(NamedTuple):
    """One row of the table. The fields have the same order as those of `FrontendPlan`."""

    pod: PolicyResult
    node: PolicyResult
    outside: PolicyResult


def internal_policy_results(service: Service, context: PlanContext, has_detector: bool) -> PolicyResults:
    """Return the results for a ClusterIP, which depend on internalTrafficPolicy only.

    Connections of clients that are not pods are masqueraded, since an endpoint on another node may have no
    route back to the client. Without a detector no client is known not to be a pod, so none is masqueraded.
    With `masquerade_all` every connection is masqueraded.
    """
    is_local = service.internal_policy is TrafficPolicy.LOCAL
    return _internal(is_local, context.masquerade_all, has_detector)


def external_policy_results(service: Service, has_detector: bool) -> PolicyResults:
    """Return the results for NodePorts, external IPs and load balancer IPs, by externalTrafficPolicy only.

    With policy Local, pods and the node itself may use endpoints on all nodes: there is no external client
    address to preserve, and the same connection could have entered the cluster at another node. Without a
    detector pods count as clients from outside.
    """
    return _external(external_policy_local(service), has_detector)


def edge_policy_results() -> PolicyResults:
    """Return the results for all frontends of an edge, whatever the policies of the Service.

    An edge is outside the cluster and has no endpoints, so externalTrafficPolicy Local applies to none of
    them. Replies must return through the edge.
    """
    return _external(False, False)


def local_policy_results(has_detector: bool) -> PolicyResults:
    """Return the results for frontends with externalTrafficPolicy Local."""
    return _external(True, has_detector)


def external_policy_local(service: Service) -> bool:
    """Return whether externalTrafficPolicy Local applies: only if the Service accepts external traffic.

    That is type NodePort or LoadBalancer, or any external IP (ExternalPolicyLocal in
    pkg/api/v1/service/util.go).
    """
    if service.external_policy is not TrafficPolicy.LOCAL:
        return False
    return service.type is not ServiceType.CLUSTER_IP or bool(service.external_ips)


@functools.cache
def _internal(is_local: bool, masquerade_all: bool, has_detector: bool) -> PolicyResults:
    scope = Scope.LOCAL if is_local else Scope.CLUSTER
    others = PolicyResult(scope, masquerade_all or has_detector)
    return PolicyResults(pod=PolicyResult(scope, masquerade_all), node=others, outside=others)


@functools.cache
def _external(is_local: bool, has_detector: bool) -> PolicyResults:
    masqueraded = PolicyResult(Scope.CLUSTER, True)
    if not is_local:
        return PolicyResults(masqueraded, masqueraded, masqueraded)
    outside = PolicyResult(Scope.LOCAL, False)
    pod = PolicyResult(Scope.CLUSTER, False) if has_detector else outside
    return PolicyResults(pod=pod, node=masqueraded, outside=outside)
