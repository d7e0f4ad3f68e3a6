"""The cluster of KUBECONFIG. It is neither created nor deleted."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.programs import Problem, Programs
from tests.cluster.proxy import NAMESPACE, uninstall
from tests.cluster.target import Target


@contextlib.contextmanager
def existing(programs: Programs, kubeconfig: Path, image: str, values: Mapping[str, Any]) -> Iterator[Target]:
    """The cluster, from which the chart is removed when the block ends.

    `image`: with a tag, from a registry that the nodes reach. `values`: further ones of the chart.
    Raises Problem, also if the cluster has a service proxy.
    """
    repository, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:
        raise Problem(
            "cannot install the chart: no image with a tag; hint: --image=registry.example/ebpfproxy:0.2.0"
        )
    bare = Target(kubeconfig, {}, "existing", "dual")
    for name, remedy in (("kube-proxy", "see docs/migration.md"), ("ebpfproxy", "helm uninstall ebpfproxy")):
        get = ("get", "daemonset", name, f"--namespace={NAMESPACE}", "--ignore-not-found", "--output=name")
        if programs.output(*bare.kubectl(*get)).strip():
            raise Problem(f"cannot install the chart: the cluster has a DaemonSet {name}; hint: {remedy}")
    host, port = _api_server(programs, bare)
    own = {"image": {"repository": repository, "tag": tag}, "apiServer": {"host": host, "port": port}}
    target = bare._replace(values={**own, **values})
    try:
        yield target
    finally:
        uninstall(programs, target)


def _api_server(programs: Programs, target: Target) -> tuple[str, int]:
    """The address of one API server, which works without Services, and its port. Raises Problem."""
    labels = "--selector=kubernetes.io/service-name=kubernetes"
    get = ("get", "endpointslices", "--namespace=default", labels, "--output=json")
    for entry in json.loads(programs.output(*target.kubectl(*get)))["items"]:
        for endpoint in entry["endpoints"]:
            return endpoint["addresses"][0], entry["ports"][0]["port"]
    raise Problem(
        "cannot find the API server: the Service default/kubernetes has no endpoint; hint: --values"
    )
