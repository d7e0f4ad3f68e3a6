"""The agent's requests to the API server use exactly the permissions of its ClusterRole."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.lab import manifests
from tests.deploy.installed import Installed
from tests.deploy.test_chart import kustomized
from tests.kernel.clients import TCP, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.support.apiserver import Request
from tests.support.kustomize import Object, one
from tests.support.oci import Image

pytestmark = pytest.mark.kernel

Right = tuple[str, str, str, str]
"""Group of the API, resource, verb, and the name of the only object; "" for all objects."""


def allowed(role: Object) -> set[Right]:
    """The rights of a role. Raises ValueError for a rule that is not about resources of the API."""
    rights: set[Right] = set()
    for rule in role["rules"]:
        if unknown := rule.keys() - {"apiGroups", "resources", "verbs", "resourceNames"}:
            raise ValueError(f"a rule with {', '.join(sorted(unknown))}")
        parts = rule["apiGroups"], rule["resources"], rule["verbs"], rule.get("resourceNames") or [""]
        rights |= set(itertools.product(*parts))
    return rights


def allowing(request: Request, rights: set[Right]) -> set[Right]:
    """Those of the rights that allow a request to /api/v1/RESOURCE or /apis/GROUP/VERSION/RESOURCE.

    /namespaces/NAMESPACE may precede the resource.

    For RBAC, a list or watch with the field selector metadata.name=NAME is a request for this object
    (RequestInfoFactory in k8s.io/apiserver).
    """
    _, root, *parts = re.sub("/namespaces/[^/]+/", "/", request.path).split("/")
    group, resource = ("", parts[1]) if root == "api" else (parts[0], parts[2])
    name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
    return rights & {(group, resource, request.verb, each) for each in ("", name)}


def test_the_role_allows_exactly_the_agents_requests(installed: Installed) -> None:
    """With and without streaming lists: the agent needs `list` only for servers that do not have them."""
    rights = allowed(one(installed.objects, "ClusterRole"))
    installed.server.fail(1_000_000, 403, match=lambda request: not allowing(request, rights))
    cluster = installed.cluster
    exposed = cluster.service()
    exposed.backends = (cluster.a,)
    installed.put(exposed)
    for streaming in ("served", "rejected"):
        installed.server.streaming_lists = streaming
        agent = installed.start()
        assert outcome(cluster.p, TCP, exposed.v4, 80) == "a"
        agent.stop()
    eventually(
        lambda: set[Right]().union(*(allowing(each, rights) for each in installed.server.requests)) == rights,
        "the requests need exactly the rights of the role",
    )


@pytest.fixture
def with_direct_return(_node: Cluster, image: Image, tmp_path: Path) -> Iterator[Installed]:
    made = Installed(_node, image, kustomized(tmp_path, "base", "direct-server-return"))
    try:
        yield made
    finally:
        made.end()


def test_with_direct_server_return_the_role_also_allows_to_annotate_the_node(
    with_direct_return: Installed,
) -> None:
    """The Node has the annotation of an earlier run. The agent changes it, or removes it on a kernel without
    Geneve."""
    installed = with_direct_return
    rights = allowed(one(installed.objects, "ClusterRole"))
    installed.server.fail(1_000_000, 403, match=lambda request: not allowing(request, rights))
    lab, addresses = installed.cluster.lab, [installed.cluster.node.v4]
    node = manifests.node(lab.node_name, addresses, annotations={"ebpfproxy/dsr-port": "1"})
    installed.server.put(node)
    for streaming in ("served", "rejected"):
        installed.server.streaming_lists = streaming
        installed.start().stop()
    eventually(
        lambda: set[Right]().union(*(allowing(each, rights) for each in installed.server.requests)) == rights,
        "the requests need exactly the rights of the role",
    )
    nodes = [each for each in installed.server.requests if each.path == "/api/v1/nodes"]
    assert any("fieldSelector" not in each.query for each in nodes), "all Nodes are watched"


def test_a_rule_with_resource_names_allows_only_these_objects() -> None:
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    rights = allowed({"rules": [rule | {"resourceNames": ["one"]}]})
    of_one = {"fieldSelector": "metadata.name=one"}
    assert allowing(Request("/api/v1/nodes", of_one, ""), rights)
    assert not allowing(Request("/api/v1/nodes", {"fieldSelector": "metadata.name=two"}, ""), rights)
    assert not allowing(Request("/api/v1/nodes", {}, ""), rights)
    assert allowing(Request("/api/v1/nodes", of_one, ""), allowed({"rules": [rule]}))


def test_a_rule_that_is_not_about_resources_is_rejected() -> None:
    with pytest.raises(ValueError, match="nonResourceURLs"):
        allowed({"rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]})
