"""ebpfproxy in the cluster: the Helm chart, and the mode of each node."""

import json

from ebpfproxy.backends import selection
from tests.cluster.programs import Problem, Programs
from tests.cluster.target import Target
from tests.support.chart import CHART

MODES = tuple(mode.name for mode in selection.MODES)
NAMESPACE = "kube-system"
_DAEMONSET = "daemonset/ebpfproxy"
_MODE = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:10249/proxyMode').read().decode())"


def install(programs: Programs, target: Target, mode: str) -> None:
    """Install the chart, or change its mode, and wait until all pods are in this mode. Raises Problem."""
    release = ("upgrade", "--install", "ebpfproxy", str(CHART), f"--namespace={NAMESPACE}", "--values=-")
    programs.run(*target.helm(*release), stdin=json.dumps({**target.values, "mode": mode}))
    # The agents would follow the ConfigMap, too, but within two minutes.
    programs.run(*target.kubectl("rollout", "restart", _DAEMONSET, f"--namespace={NAMESPACE}"))
    status = ("rollout", "status", _DAEMONSET, f"--namespace={NAMESPACE}", "--timeout=15m")
    programs.run(*target.kubectl(*status))
    _check_modes(programs, target, mode)


def uninstall(programs: Programs, target: Target) -> None:
    programs.status(*target.helm("uninstall", "ebpfproxy", f"--namespace={NAMESPACE}", "--ignore-not-found"))


def _check_modes(programs: Programs, target: Target, mode: str) -> None:
    nodes = _names(programs, target, "nodes", "--selector=kubernetes.io/os=linux")
    pods = _names(programs, target, "pods", f"--namespace={NAMESPACE}", "--selector=k8s-app=ebpfproxy")
    if len(pods) != len(nodes):
        raise Problem(
            f"cannot test mode {mode}: {len(pods)} pods on {len(nodes)} nodes; hint: kubectl get pods"
        )
    for pod in pods:
        inside = ("exec", pod, f"--namespace={NAMESPACE}", "--", "python3", "-c", _MODE)
        found = programs.output(*target.kubectl(*inside)).strip()
        if found != mode:
            raise Problem(f"cannot test mode {mode}: {pod} is in mode {found}; hint: kubectl logs {pod}")


def _names(programs: Programs, target: Target, *what: str) -> list[str]:
    items = json.loads(programs.output(*target.kubectl("get", *what, "--output=json")))["items"]
    return [entry["metadata"]["name"] for entry in items]
