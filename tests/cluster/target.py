"""A cluster without a service proxy, in which tests run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.programs import Programs


class Target(NamedTuple):
    """`values`: those of the chart, without the mode. `network`: the network plugin. `families`: "dual" or
    "ipv4"."""

    kubeconfig: Path
    values: Mapping[str, Any]
    network: str
    families: str

    def kubectl(self, *arguments: str) -> list[str]:
        return ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]

    def helm(self, *arguments: str) -> list[str]:
        return ["helm", f"--kubeconfig={self.kubeconfig}", *arguments]

    def await_nodes(self, programs: Programs) -> None:
        """Wait until all nodes are ready and the cluster's DNS answers. Raises Problem."""
        programs.run(*self.kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=10m"))
        dns = ("rollout", "status", "deployment/coredns", "--namespace=kube-system", "--timeout=10m")
        programs.run(*self.kubectl(*dns))
