"""Reports pods that claim addresses of other machines by hostIP."""

from ebpfproxy.log import Logger
from ebpfproxy.model.address import format_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.pod import HostPort
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.host_ports import elsewhere
from ebpfproxy.plan.service_plan import PlanContext

log = Logger(__name__)

NOT_SERVED = "Host port at an address that is not of this node, not serving it"
"""Connections of this node to another machine would reach the pod. Set hostIP to an address of the node, or
remove it."""


class ForeignHostIps:
    """Logs each such host port once, until it or the addresses of the node change."""

    def __init__(self, context: PlanContext) -> None:
        self._host_ports = context.host_ports
        self._reported: dict[NamespacedName, tuple[HostPort, ...]] = {}

    def update(self, name: NamespacedName, state: ClusterState) -> None:
        """Report the pod that is planned under this name; a name of a Service has none."""
        pod, previous = state.pods.get(name), self._reported.pop(name, ())
        if pod is None or not self._host_ports:
            return
        found = elsewhere(pod, state.local_networks)
        if found:
            self._reported[name] = found
        for each in found:
            if each not in previous and each.host_address:
                log.warning(
                    NOT_SERVED,
                    pod=str(pod.name),
                    host_ip=format_address(each.host_address),
                    host_port=each.host_port,
                    hint="set hostIP to an address of the node, or remove it",
                )
