"""The truth table: what becomes of a new connection, by the kind of frontend and the class of its source.

The rows are those that kube-proxy's iptables and nftables modes write as chains KUBE-SVC, KUBE-SVL and
KUBE-EXT (syncProxyRules in pkg/proxy/iptables/proxier.go). Three classes of sources: pods, as the
detector of local traffic knows them; the node itself; all others.
"""

import functools
from typing import NamedTuple

from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.service_plan import PlanContext, PolicyResult, Scope


class PolicyResults(NamedTuple):
    """One row of the table; the fields stand in the order of those of `FrontendPlan`."""

    pod: PolicyResult
    node: PolicyResult
    outside: PolicyResult


def internal_policy_results(service: Service, context: PlanContext, has_detector: bool) -> PolicyResults:
    """What a ClusterIP does. Only internalTrafficPolicy counts.

    Who is not a pod is masqueraded, since an endpoint elsewhere has perhaps no way back to it; without
    a detector no client is known to be no pod, so none is, unless all are by masqueradeAll.
    """
    local = service.internal_policy is TrafficPolicy.LOCAL
    return _internal(local, context.masquerade_all, has_detector)


def external_policy_results(service: Service, has_detector: bool) -> PolicyResults:
    """What a NodePort, an external IP or a load balancer's IP does. Only externalTrafficPolicy counts.

    With policy Local pods and the node itself are let through to every endpoint: there is no client
    address to preserve, and what they dial might as well have come in at another node. Without a
    detector pods count as others.
    """
    return _external(external_policy_local(service), has_detector)


def external_policy_local(service: Service) -> bool:
    """Whether externalTrafficPolicy Local counts: only where there is external traffic to speak of.

    ExternalPolicyLocal in pkg/api/v1/service/util.go: type NodePort or LoadBalancer, or any external IP.
    """
    if service.external_policy is not TrafficPolicy.LOCAL:
        return False
    return service.type is not ServiceType.CLUSTER_IP or bool(service.external_ips)


@functools.cache
def _internal(local: bool, masquerade_all: bool, has_detector: bool) -> PolicyResults:
    scope = Scope.LOCAL if local else Scope.CLUSTER
    others = PolicyResult(scope, masquerade_all or has_detector)
    return PolicyResults(pod=PolicyResult(scope, masquerade_all), node=others, outside=others)


@functools.cache
def _external(local: bool, has_detector: bool) -> PolicyResults:
    masqueraded = PolicyResult(Scope.CLUSTER, True)
    if not local:
        return PolicyResults(masqueraded, masqueraded, masqueraded)
    outside = PolicyResult(Scope.LOCAL, False)
    pod = PolicyResult(Scope.CLUSTER, False) if has_detector else outside
    return PolicyResults(pod=pod, node=masqueraded, outside=outside)
