"""The agent on a lab's node as started by the DaemonSet: its pod, service account and ConfigMap."""

import itertools
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ebpfproxy.lab import Agent, manifests
from ebpfproxy.linux import mounts
from ebpfproxy.linux.netns import netns
from tests.kernel.cluster import START_PATIENCE, Cluster, Exposed
from tests.support import oci
from tests.support.apiserver import ApiServer
from tests.support.kustomize import Object, one

_CLUSTER_IP = "10.96.0.1"
"""The ClusterIP of the Service kubernetes. It does not answer: the pod must not need it."""
_NUMBERS = itertools.count(1)


class Installed:
    """Pods of the DaemonSet in `objects` on the node of `cluster`.

    `paths` are the node's folders and files that pods mount. Tests may replace `objects` and `paths`.
    """

    def __init__(self, cluster: Cluster, image: oci.Image, objects: Sequence[Object]) -> None:
        self.cluster = cluster
        self.image = image
        self.objects = objects
        self._name = f"{cluster.lab.identity}-{next(_NUMBERS)}"
        self._folder = cluster.lab.folder / self._name
        self._folder.mkdir()
        self._pods: list[oci.Pod] = []
        self._agent: Agent | None = None
        self.server = ApiServer()
        self.server.put(manifests.node(cluster.lab.node_name, [cluster.node.v4, cluster.node.v6]))
        self.paths = {
            "/sys/fs/bpf": cluster.lab.bpffs,
            "/sys/fs/cgroup": Path("/sys/fs/cgroup"),
            "/proc/sys/net": Path("/proc/sys/net"),
            "/run/xtables.lock": self._folder / "xtables.lock",
        }
        with netns.entered(cluster.node.netns):
            self.server.start()

    def end(self) -> None:
        self.kill()
        self.server.stop()

    def put(self, exposed: Exposed) -> Exposed:
        for entry in exposed.objects():
            self.server.put(entry)
        return exposed

    @property
    def pod(self) -> oci.Pod:
        """The pod that was started last."""
        return self._pods[-1]

    def start(self) -> Agent:
        """Start the pod and wait for its first sync.

        A flag sets the lab's cgroup: otherwise the agent would find this machine's cgroup root.
        """
        cgroup = self.cluster.lab.cgroup.relative_to(mounts.cgroup2_root())
        pod = self._make((), [f"--cgroup-root=/host/sys/fs/cgroup/{cgroup}"])
        self._pods.append(pod)
        self._agent = Agent(self.cluster.node, (), pod.command())
        self._agent.await_sync(timeout=START_PATIENCE)
        return self._agent

    def kill(self) -> None:
        """Kill the pod that was started last if it runs, like a crash."""
        if self._agent and (pid := self.pod.pid()):
            os.kill(pid, signal.SIGKILL)
            self._agent.process.wait(10)

    def run(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run a pod with other container arguments until its end."""
        return self.cluster.node.run(self._make(args, ()).command(), check=False, timeout=120)

    def execute(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ebpfproxy in the pod that was started last, like `kubectl exec`."""
        command = self.pod.execution([*self.image.entrypoint, *arguments])
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def configure(self, text: str) -> None:
        """Change config.conf in the ConfigMap and in the running pod's volume."""
        one(self.objects, "ConfigMap")["data"]["config.conf"] = text
        self.pod.update_config_map("config", {"config.conf": text})

    def _make(self, args: Sequence[str], more: Sequence[str]) -> oci.Pod:
        config_map = one(self.objects, "ConfigMap")
        host = oci.Host(
            netns=self.cluster.node,
            name=self.cluster.lab.node_name,
            paths=self.paths,
            secrets=self._service_account(),
            config_maps={
                config_map["metadata"]["name"]: config_map["data"] | {"api-server": self.server.url}
            },
            api_host=_CLUSTER_IP,
            api_port=443,
        )
        name = f"{self._name}-{next(_NUMBERS)}"
        return oci.make(self._folder / name, one(self.objects, "DaemonSet"), self.image, host, args, more)

    def _service_account(self) -> Path:
        folder = self._folder / "service-account"
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(str(self.server.token))
        (folder / "ca.crt").write_bytes(self.server.authority.cert_pem.bytes())
        (folder / "namespace").write_text("kube-system")
        return folder
