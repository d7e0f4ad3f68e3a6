"""A cluster of kind without kube-proxy, with one of several network plugins."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.cluster.programs import Problem, Programs
from tests.cluster.target import Target
from tests.cluster.versions import Network, versions
from tests.support.kustomize import DEPLOY, REPOSITORY

NAME = "ebpfproxy-test"
PODS = {"dual": "10.244.0.0/16,fd00:10:244::/56", "ipv4": "10.244.0.0/16"}
"""The networks of pods that kind configures, by the cluster's family."""
_IMAGE, _TAG = "localhost/ebpfproxy", "test-cluster"
_BRIDGED = (
    "apt-get -qq update && apt-get -qq install --no-install-recommends --yes containernetworking-plugins "
    ">/dev/null && cp"
)


def configuration(network: Network, is_default: bool) -> str:
    """The cluster for `kind create cluster --config`. `is_default`: whether kind installs kindnet."""
    networking = {
        "ipFamily": network.family,
        "kubeProxyMode": "none",
        "disableDefaultCNI": not is_default,
        "podSubnet": PODS[network.family],
        "dnsSearch": [],  # no search domains of this machine
    }
    nodes = [{"role": role} for role in ("control-plane", "worker", "worker")]
    cluster = {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4"}
    return yaml.safe_dump({**cluster, "networking": networking, "nodes": nodes}, sort_keys=False)


@contextlib.contextmanager
def created(
    programs: Programs, engine: str, kubernetes: str, name: str, scratch: Path, logs: Path
) -> Iterator[Target]:
    """A cluster with the image of this checkout on its nodes, which exists until the block ends.

    `kubernetes`: a minor version. `name`: the network plugin's, which `install_network` installs. If the
    block raises an exception, the cluster's logs are in `logs`. Raises Problem.
    """
    network = versions().networks[name]
    values = {
        "image": {"repository": _IMAGE, "tag": _TAG, "pullPolicy": "Never"},
        "apiServer": {"host": f"{NAME}-control-plane"},
        "config": {"detectLocalMode": "ClusterCIDR", "clusterCIDR": PODS[network.family]},
    }
    if NAME in programs.output("kind", "get", "clusters").split():
        raise Problem(f"cannot create {NAME}: it exists; hint: kind delete cluster --name={NAME}")
    target = Target(scratch / "kubeconfig", values, name, network.family)
    cluster = (f"--name={NAME}", f"--kubeconfig={target.kubeconfig}")
    (scratch / "kind.yaml").write_text(configuration(network, "kindnet" in (name, network.behind)))
    with contextlib.ExitStack() as stack:
        stack.callback(programs.status, engine, "image", "rm", f"{_IMAGE}:{_TAG}")
        _build(programs, engine, scratch / "image.tar")
        stack.callback(programs.status, "kind", "delete", "cluster", *cluster)
        image = versions().node_images[kubernetes]
        programs.run(
            "kind", "create", "cluster", *cluster, f"--image={image}", f"--config={scratch}/kind.yaml"
        )
        try:
            programs.run("kind", "load", "image-archive", scratch / "image.tar", f"--name={NAME}")
            (scratch / "image.tar").unlink(missing_ok=True)
            yield target
        except BaseException:
            programs.status("kind", "export", "logs", logs, f"--name={NAME}")
            raise


def _build(programs: Programs, engine: str, archive: Path) -> None:
    image = f"{_IMAGE}:{_TAG}"
    file = DEPLOY / "Dockerfile"
    programs.run(engine, "build", f"--file={file}", "--target=default", f"--tag={image}", REPOSITORY)
    programs.run(engine, "save", f"--output={archive}", image)


def install_network(programs: Programs, engine: str, target: Target) -> None:
    """Install the network plugin. The service proxy must run, because plugins reach the API server by its
    ClusterIP. Raises Problem."""
    network = versions().networks[target.network]
    if network.plugins:
        copied = " ".join(f"/usr/lib/cni/{name}" for name in network.plugins)
        for node in programs.output("kind", "get", "nodes", f"--name={NAME}").split():
            programs.run(engine, "exec", node, "sh", "-c", f"{_BRIDGED} {copied} /opt/cni/bin/")
    for chart in network.charts:
        install = (
            f"--repo={chart.repository}",
            f"--version={chart.version}",
            f"--namespace={chart.namespace}",
        )
        programs.run(
            *target.helm("upgrade", "--install", chart.name, chart.name, *install, "--create-namespace"),
            "--values=-",
            stdin=json.dumps(chart.values),
        )
    if network.manifest:
        programs.run(*target.kubectl("apply", "--server-side", f"--filename={network.manifest}"))
