"""A node with its pods on this machine: network namespaces, cgroups and a bpffs of their own.

The demonstration, the benchmarks and the kernel's tests run the agent here, never on the machine's
own devices, cgroup root or /sys/fs/bpf. Nothing here knows what the agent does with a Service.
"""

from ebpfproxy.lab.agent import Agent, AgentFailed
from ebpfproxy.lab.lab import Lab
from ebpfproxy.lab.place import Call, Place
from ebpfproxy.lab.pod import Pod

__all__ = ["Agent", "AgentFailed", "Call", "Lab", "Place", "Pod"]
