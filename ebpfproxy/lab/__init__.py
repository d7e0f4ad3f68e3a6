"""A testbed on this machine: nodes and pods as network namespaces, with their own cgroups and bpffs.

The demo, the benchmarks and the kernel tests run the agent in a lab, never on the machine's own devices,
cgroup root or /sys/fs/bpf. This package does not depend on how the agent implements Services.

Only `bench` and `cli` may import this package, besides tests. It imports `agent` (one log message), `linux`,
`model` and `errors`.

Read first: `lab.py`, then `node.py`.
"""

from ebpfproxy.lab.agent import Agent, AgentFailed
from ebpfproxy.lab.lab import Lab
from ebpfproxy.lab.netns import Call, Netns
from ebpfproxy.lab.node import Node
from ebpfproxy.lab.pod import Pod
from ebpfproxy.lab.pod_network import PodNetwork

__all__ = ["Agent", "AgentFailed", "Call", "Lab", "Netns", "Node", "Pod", "PodNetwork"]
