"""The agent's requests to the API server use exactly the permissions of its ClusterRole."""

import re

import pytest

from tests.deploy.installed import Installed
from tests.kernel.clients import TCP, outcome
from tests.kernel.cluster import eventually
from tests.support.apiserver import Request
from tests.support.kustomize import Object, one

pytestmark = pytest.mark.kernel

Right = tuple[str, str, str]
"""Group of the API, resource, verb."""


def allowed(role: Object) -> set[Right]:
    """The rights of a role, without rules for other things than complete resources. May raise KeyError."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if rule.keys() == {"apiGroups", "resources", "verbs"}
    }


def needed_right(request: Request) -> Right:
    """The right that a request to /api/v1/RESOURCE... or /apis/GROUP/VERSION/RESOURCE... needs.

    /namespaces/NAMESPACE may precede the resource.
    """
    _, root, *parts = re.sub("/namespaces/[^/]+/", "/", request.path).split("/")
    group, resource = ("", parts[1]) if root == "api" else (parts[0], parts[2])
    return group, resource, request.verb


def test_the_role_allows_exactly_the_agents_requests(installed: Installed) -> None:
    rights = allowed(one(installed.objects, "ClusterRole"))
    installed.server.fail(1_000_000, 403, match=lambda request: needed_right(request) not in rights)
    cluster = installed.cluster
    exposed = cluster.service()
    exposed.backends = (cluster.a,)
    installed.put(exposed)
    agent = installed.start()
    assert outcome(cluster.p, TCP, exposed.v4, 80) == "a"
    eventually(
        lambda: {needed_right(request) for request in installed.server.requests} == rights,
        "the requests need exactly the rights of the role",
    )
    agent.stop()
