"""The options of the mode ebpf. All are ebpfproxy's own, so a KubeProxyConfiguration has none of them."""

# ruff: noqa: RUF009 -- option() makes a dataclasses.field(), which is what a default may be made by

import dataclasses
from pathlib import Path

from ebpfproxy.config import flag_types
from ebpfproxy.config.option import Group, option
from ebpfproxy.plan.service_plan import SocketLb

_EBPF = Group.EBPF


@dataclasses.dataclass(frozen=True, kw_only=True)
class EbpfOptions:
    """A part of `Config`."""

    cgroup_root: Path | None = option(
        "--cgroup-root", flag_types.OPTIONAL_DIRECTORY, "", _EBPF,
        "The host's cgroup v2 root, where sockets are caught. Default: found by itself.",
    )  # fmt: skip
    bpffs_root: Path = option(
        "--bpffs-root", flag_types.ABSOLUTE_PATH, "/sys/fs/bpf/ebpfproxy", _EBPF,
        "Where programs, maps and links are pinned.",
    )  # fmt: skip
    proc_root: Path = option(
        "--proc-root", flag_types.ABSOLUTE_PATH, "/proc", _EBPF,
        "The host's proc file system, where the network namespaces of pods are found.",
    )  # fmt: skip
    socket_lb: SocketLb = option(
        "--socket-lb", flag_types.SOCKET_LB, "on", _EBPF,
        "Whose sockets are sent to an endpoint when they connect, which costs nothing afterwards; the "
        "packets of all others are translated. on: those of pods and of the node; host: of the node "
        "alone; off: nobody's. Everything works with each. Service meshes whose sidecars must see the "
        "Service's address need host or off.",
    )  # fmt: skip
    tc_devices: tuple[str, ...] = option(
        "--tc-devices", flag_types.DEVICE_PATTERNS, "", _EBPF,
        "Translate packets on the network devices of these names or patterns, such as eth*, and on no "
        "others but loopback. May be given more than once. none: on no device at all, so that another agent "
        "may have those of this network namespace. Default: found by what they are: uplinks, tunnels, and "
        "devices of pods as far as these need it.",
    )  # fmt: skip
    ebpf_stale_udp: str = option(
        "--ebpf-stale-udp", flag_types.one_of("reconnect", "destroy"), "reconnect", _EBPF,
        "What happens to a connected UDP socket whose endpoint is gone. reconnect: it is connected to "
        "another endpoint, and its process notices nothing; needs CAP_SYS_PTRACE and Linux 5.6. Without them "
        "the packets of pods' sockets are translated. destroy: the same, and a socket that is neither "
        "reconnected nor translated is destroyed: its process gets ECONNABORTED, and has to connect again.",
    )  # fmt: skip
    ebpf_redirect: bool = option(
        "--ebpf-redirect", flag_types.BOOLEAN, "false", _EBPF,
        "Send flows of clients outside past this node's network stack: faster, but FORWARD rules, network "
        "policies by iptables or nftables, and connection tracking of this node do not see them.",
    )  # fmt: skip
    ebpf_flows_max: int = option(
        "--ebpf-flows-max", flag_types.ENTRIES, "262144", _EBPF,
        "Established flows whose packets are translated. An eighth as many may be half-open besides, and at "
        "least 4096.",
    )  # fmt: skip
    ebpf_source_ranges_max: int = option(
        "--ebpf-source-ranges-max", flag_types.ENTRIES, "65536", _EBPF,
        "Source ranges of load balancers that the maps hold, over all ServicePorts.",
    )  # fmt: skip
    ebpf_services_max: int = option(
        "--ebpf-services-max", flag_types.ENTRIES, "65536", _EBPF,
        "Frontends that the maps hold: each address, port and protocol of a Service is one.",
    )  # fmt: skip
    ebpf_slots_max: int = option(
        "--ebpf-slots-max", flag_types.ENTRIES, "1048576", _EBPF,
        "Slots that the maps hold: one for each endpoint of each ServicePort.",
    )  # fmt: skip
    ebpf_endpoints_max: int = option(
        "--ebpf-endpoints-max", flag_types.ENTRIES, "262144", _EBPF,
        "Different endpoints that the maps hold.",
    )  # fmt: skip
    ebpf_affinity_max: int = option(
        "--ebpf-affinity-max", flag_types.ENTRIES, "65536", _EBPF,
        "Clients with session affinity that are remembered; beyond that the oldest is forgotten.",
    )  # fmt: skip
    ebpf_sockets_max: int = option(
        "--ebpf-sockets-max", flag_types.ENTRIES, "262144", _EBPF,
        "Sockets connected to a Service that are remembered, in each map of them.",
    )  # fmt: skip
