"""The network namespaces of this machine that may be those of pods, and the path of their sockets."""

import contextlib
import sys
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.sockets import pod_namespaces
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import format_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.namespace import NamespaceClass
from ebpfproxy.plan.namespaces import classify

SOCKET, PACKET = "socket", "packet"
"""Values of `path`."""
NOT_SERVED = "not served yet, excluded by --socket-lb, or by the annotation of its pod or Namespace"
BY_ADDRESS = "an address of the Node's podCIDRs"


class NamespaceRow(NamedTuple):
    """A network namespace other than the node's.

    - `path`: that of its sockets, by the map of the programs.
    - `pod`: the UID of its pod, "" if its processes are in no cgroup of kubelet.
    - `devices`: those that are up, without loopback.
    - `reason`: why it is a pod's or not, and why it has this path, by what the node shows. The cluster is not
      read.
    """

    cookie: int
    path: str
    pod: str
    addresses: list[str]
    devices: list[str]
    reason: str


def namespaces(bpffs_root: Path, proc_root: Path, cgroup_root: Path | None) -> list[NamespaceRow]:
    """Read the namespaces, sorted by cookie.

    Raises NotFound if nothing is pinned, another KernelError if the map or the namespaces cannot be read.
    """
    with contextlib.closing(Map.pinned(Pins(bpffs_root).hooked_in() / "maps" / "pod_namespaces")) as served:
        cookies = {int.from_bytes(key, sys.byteorder) for key, _ in served.items()}
    nothing = ClusterState({}, {})
    rows = []
    for each in pod_namespaces.read(proc_root, cgroup_root):
        found, reason = classify(each, nothing)
        if each.cookie in cookies:
            reason = BY_ADDRESS if found is NamespaceClass.OTHER else reason
        elif found is NamespaceClass.SOCKET_PATH:
            reason = f"{reason}; {NOT_SERVED}"
        path = SOCKET if each.cookie in cookies else PACKET
        addresses = [format_address(address) for address in sorted(each.addresses)]
        rows.append(NamespaceRow(each.cookie, path, each.pod, addresses, list(each.up), reason))
    return rows
