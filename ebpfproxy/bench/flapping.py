"""A Service whose endpoints come and go, but for one, and who answers there."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Lab, manifests

NODE_PORT = 30000
_FLAPPING = 4
"""How many endpoints come and go, beside the one that stays. Their servers stay, as pods that have to
end do for a while: what is sought is not a connection that came too late, but one sent anywhere else."""

_ANSWERING = {0: "10.128.0.0/30", 1: "10.128.0.4/30"}
"""The addresses of those endpoints, by the index of their node; elsewhere nothing answers."""


def serve(lab: Lab, load: Load) -> None:
    """A pod on each node, that answers at addresses of its own."""
    first, second = lab.nodes
    workload.server_pod(lab, load, _ANSWERING[0])
    far, there = second.pod("server-2"), _ANSWERING[1]
    load.serve(far, workload.ENDPOINT_PORT)
    lab.ip(far, f"route add local {there} dev lo")
    lab.ip(second.host, f"route add {there} via {far.v4}")
    lab.ip(lab.router, f"route add {there} via {second.host.v4}")
    lab.ip(first.host, f"route add {there} via {lab.addresses.router.v4}")


class Slices:
    """One Service's manifests: an endpoint that stays in one slice, those that come and go in another."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        """`nodes`: the names of those that have the addresses of _ANSWERING."""
        self.folder = folder
        self._nodes = nodes
        folder.mkdir()
        port = manifests.port(workload.PORT, target=workload.ENDPOINT_PORT, node_port=NODE_PORT)
        service = manifests.service("service-0", [workload.cluster_ip(0)], [port])
        manifests.write(folder / "service.json", service)
        manifests.write(folder / "staying.json", self._slice("staying", [0]))
        self._path = folder / "flapping.json"
        self.flap(0)

    def flap(self, turn: int) -> None:
        """Each turn another set, of none up to all."""
        present = [1 + index for index in range(_FLAPPING) if turn * 7 >> index & 1]
        manifests.write(self._path, self._slice("flapping", present))

    def _slice(self, name: str, indices: Sequence[int]) -> manifests.Object:
        entries = [
            manifests.endpoint(workload.endpoint_address(index), node=self._node(index)) for index in indices
        ]
        ports = [manifests.port(workload.ENDPOINT_PORT)]
        return manifests.endpoint_slice(name, "service-0", entries, ports, family="IPv4")

    def _node(self, index: int) -> str:
        address = ipaddress.ip_address(workload.endpoint_address(index))
        return next(
            self._nodes[node] for node, own in _ANSWERING.items() if address in ipaddress.ip_network(own)
        )
