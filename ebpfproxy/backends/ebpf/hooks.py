"""The hooks that the programs are attached to.

The numbers are those of include/uapi/linux/bpf.h. `since` is the first kernel that has a hook, for messages
only. Which hooks this kernel has is found by loading a program.
"""

from typing import NamedTuple

_SOCK_ADDR, _SOCK = 18, 9  # BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_PROG_TYPE_CGROUP_SOCK
SCHED_CLS = 3  # BPF_PROG_TYPE_SCHED_CLS
XDP = 6  # BPF_PROG_TYPE_XDP
XDP_ATTACH_TYPE = 37  # BPF_XDP


class Hook(NamedTuple):
    """A hook. `name`: of the program, its pin and the link's pin. `optional`: the backend works without
    it."""

    name: str
    program_type: int
    attach_type: int
    since: str
    optional: bool = False


# In the order of attaching: hooks that translate addresses back precede those that redirect sockets.
SOCKET_HOOKS = (
    Hook("sock_release", _SOCK, 34, "5.9", optional=True),
    Hook("getpeername4", _SOCK_ADDR, 29, "5.8", optional=True),
    Hook("getpeername6", _SOCK_ADDR, 30, "5.8", optional=True),
    Hook("recvmsg4", _SOCK_ADDR, 19, "5.2"),
    Hook("recvmsg6", _SOCK_ADDR, 20, "5.2"),
    Hook("sendmsg4", _SOCK_ADDR, 14, "4.18"),
    Hook("sendmsg6", _SOCK_ADDR, 15, "4.18"),
    Hook("connect4", _SOCK_ADDR, 10, "4.17"),
    Hook("connect6", _SOCK_ADDR, 11, "4.17"),
    Hook("post_bind4", _SOCK, 12, "4.17"),
    Hook("post_bind6", _SOCK, 13, "4.17"),
)
BIND_HOOKS = tuple(hook for hook in SOCKET_HOOKS if hook.name.startswith("post_bind"))
"""The hooks that keep sockets of the node from being bound to NodePorts."""
CONNECT4 = next(hook for hook in SOCKET_HOOKS if hook.name == "connect4")

CLASSIFIERS = ("from_any", "from_any_l3", "to_any", "to_any_l3", "from_tunnel")
"""The programs for network devices, by the names of their functions and pins."""

XDP_PROGRAM = "xdp_forward"
"""The XDP program, by the name of its function and pin."""

ON_DEMAND = ("from_any_l3", "to_any_l3", "from_tunnel", XDP_PROGRAM)
"""Programs that are loaded when a device first needs them. Most nodes have no device without a link layer, no
tunnel device and no --ebpf-xdp, and the verifier takes as long for these programs as for the others."""

TAIL_CALLS = ("find_port", "open_in", "open_out", "icmp_in", "icmp_out", "dial_tunnel")
"""The programs of the map `tail_calls`, in the order of `enum tail_call` of bpf/maps.h."""

TUNNEL_TAIL_CALLS = ("dial_tunnel",)
"""Those of TAIL_CALLS that only direct server return needs. They are the last ones."""
