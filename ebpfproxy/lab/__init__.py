"""Nodes with their pods on this machine: network namespaces, cgroups and a bpffs of their own.

The demonstration, the benchmarks and the kernel's tests run the agent here, never on the machine's
own devices, cgroup root or /sys/fs/bpf. Nothing here knows what the agent does with a Service.
"""

from ebpfproxy.lab.agent import Agent, AgentFailed
from ebpfproxy.lab.lab import Lab
from ebpfproxy.lab.netns import Call, Netns
from ebpfproxy.lab.node import Node
from ebpfproxy.lab.pod import Pod
from ebpfproxy.lab.pod_network import PodNetwork

__all__ = ["Agent", "AgentFailed", "Call", "Lab", "Netns", "Node", "Pod", "PodNetwork"]
