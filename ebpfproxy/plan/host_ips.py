"""Which address is the node's own in each family, where it has several."""

from ebpfproxy.model.address import Address, Family, family
from ebpfproxy.model.node import Node
from ebpfproxy.plan.service_plan import PlanContext


def host_ips(node: Node | None, context: PlanContext) -> tuple[Address, ...]:
    """Of each family one at the most: `context.bind_address`, else the Node's first InternalIP, else its
    first ExternalIP (GetNodeHostIPs in pkg/util/node/node.go, detectNodeIPs in cmd/kube-proxy/app/server.go).
    Empty where none is set: kube-proxy's loopback serves no client.
    """
    bound = (context.bind_address,) if context.bind_address else ()
    reported = (*node.addresses, *node.external_addresses) if node else ()
    found: dict[Family, Address] = {}
    for address in (*bound, *reported):
        found.setdefault(family(address), address)
    return tuple(found.values())
