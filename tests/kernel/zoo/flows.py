"""The flows that every situation tries, and what kube-proxy does with them.

Source of the table: kube-proxy's chains KUBE-SVC-*, KUBE-EXT-* and KUBE-SVL-* (Kubernetes 1.36,
pkg/proxy/iptables/proxier.go), with local traffic detection.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP
from tests.kernel.differences import Differences

FAMILIES = ("v4", "v6")
PROTOCOLS = (TCP, UDP)
SERVICES = ("here", "there", "local", "away", "empty")
"""The Services by their endpoint: on this node, on another one, the same two with the external traffic
policy Local, and none."""
ENDPOINTS = {"here": "a", "there": "d", "local": "a", "away": "d", "self": "host", "second": "host-2"}
"""By Service, the name of the pod that answers; also of the hosts, which are no Services."""
CLIENT, NODE, HOST = "client", "node", "host"
"""Source addresses that the server sees: the client's own; the node's address towards the endpoint; the same
by a rule of the host, so that it is the same in every mode."""

KUBE_PROXY = """
client   frontend      here     there    local    away     empty
pod      ClusterIP     client   client   -        -        refused
pod      NodePort      node     node     client   client   refused
pod      LoadBalancer  node     node     client   client   refused
node     ClusterIP     node     node     -        -        refused
node     NodePort      node     node     node     node     refused
node     LoadBalancer  node     node     node     node     refused
guest    ClusterIP     node     node     -        -        refused
guest    NodePort      node     node     client   silent   refused
guest    LoadBalancer  node     node     client   silent   refused
outside  ClusterIP     node     node     -        -        refused
outside  NodePort      node     node     client   silent   refused
outside  LoadBalancer  node     node     client   silent   refused
"""
"""By client, frontend and Service: the source address that the endpoint sees, or refused or silent; -: not
tried. It is the same for TCP and UDP and for both families."""


class Flow(NamedTuple):
    """A client's connection."""

    client: str
    frontend: str
    service: str
    protocol: Protocol
    family: str

    def __str__(self) -> str:
        return f"{self.client} {self.frontend} {self.service} {self.protocol.name.lower()} {self.family}"

    def matches(self, pattern: str) -> bool:
        """Whether each word of the pattern is * or one of some words of the flow, separated by `|`.

        >>> Flow("pod", "NodePort", "here", TCP, "v4").matches("pod|node NodePort * * v4")
        True
        >>> Flow("pod", "NodePort", "here", TCP, "v4").matches("pod * there * *")
        False
        """
        pairs = zip(pattern.split(), str(self).split(), strict=True)
        return all(given == "*" or word in given.split("|") for given, word in pairs)


def _rows() -> Iterator[tuple[Flow, str]]:
    header, *lines = (line.split() for line in KUBE_PROXY.strip().splitlines())
    for client, frontend, *results in lines:
        for service, result in zip(header[2:], results, strict=True):
            for protocol, family in itertools.product(PROTOCOLS, FAMILIES):
                if result != "-":
                    yield Flow(client, frontend, service, protocol, family), result


ADDRESSES = {
    ("pod", "self"): CLIENT,
    ("pod", "second"): CLIENT,
    ("node", "second"): NODE,
    ("guest", "self"): CLIENT,
    ("guest", "second"): CLIENT,
    ("outside", "self"): CLIENT,
    ("outside", "second"): CLIENT,
}
"""By client and node: the source address that a server on the node itself sees over TCP, at a port that no
Service has. No proxy may change these."""


def _addresses() -> Iterator[tuple[Flow, str]]:
    for ((client, node), result), family in itertools.product(ADDRESSES.items(), FAMILIES):
        yield Flow(client, "Address", node, TCP, family), result


DEFAULTS = dict(itertools.chain(_rows(), _addresses()))
"""By flow, the result in the table."""


def translated(flow: Flow, result: str, by_socket: bool, bound: bool, differences: Differences) -> str:
    """The result in a mode that masquerades less, given kube-proxy's.

    `by_socket`: whether sockets connect to endpoints; `bound`: whether the client's have an address.
    docs/dataplanes/README.md has this difference for users.
    """
    if result == HOST:
        return NODE
    if result != NODE or differences.masquerades_here:
        return result
    if flow.client == "node":
        return CLIENT if bound and by_socket and ENDPOINTS.get(flow.service) == "a" else NODE
    return CLIENT if flow.service == "here" or (flow.client == "pod" and by_socket) else NODE


def in_mode(flow: Flow, result: str, beyond: str, differences: Differences) -> str:
    """The result with the mode's differences for relays and rejections.

    `beyond`: the result of the node's packets to a load balancer address that the mode does not reject.
    """
    if flow.frontend == "Address":
        return result
    if result == CLIENT and differences.by_relay:
        return NODE
    if flow.client == "node" and result == REFUSED:
        if flow.frontend == "LoadBalancer" and differences.own_external == SILENT:
            return beyond
        # A NodePort's packet is rejected at the chain INPUT, where its sender does not notice.
        if flow.frontend != "NodePort" or differences.at_output:
            return differences.to_node(flow.protocol, result)
    return result
