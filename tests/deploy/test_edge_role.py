"""The requests of an edge to the API server use exactly the permissions of its ClusterRole."""

from pathlib import Path

import pytest

from ebpfproxy.lab import Lab, PodNetwork, manifests
from ebpfproxy.linux.netns import netns
from tests.deploy.test_cluster_role import allowed, allowing
from tests.kernel.cluster import START_PATIENCE, eventually
from tests.support.apiserver import ApiServer
from tests.support.kustomize import DEPLOY, one, render

pytestmark = pytest.mark.kernel


def test_the_role_allows_exactly_the_requests_of_an_edge(tmp_path: Path) -> None:
    """With and without streaming lists: the agent needs `list` only for servers that do not have them."""
    rights = allowed(one(render(DEPLOY / "edge"), "ClusterRole"))
    server = ApiServer()
    server.put(manifests.node("node-1", ["192.0.2.1"]))
    server.fail(1_000_000, 403, match=lambda request: not allowing(request, rights))
    with Lab("edge-role", 83, PodNetwork.ROUTED, edges=1) as lab:
        with netns.entered(lab.edges[0].host.netns):
            server.start()
        try:
            server.write_kubeconfig(tmp_path / "kubeconfig")
            access = ["--manifests=", f"--kubeconfig={tmp_path / 'kubeconfig'}"]
            for streaming in ("served", "rejected"):
                server.streaming_lists = streaming
                flags = [*access, "--role=edge", "--edge-drain-seconds=0"]
                lab.edges[0].agent(tmp_path, *flags, wait=START_PATIENCE).stop()
            eventually(
                lambda: set().union(*(allowing(each, rights) for each in server.requests)) == rights,
                "the requests need exactly the rights of the role",
            )
        finally:
            server.stop()
