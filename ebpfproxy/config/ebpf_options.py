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
        "The host's cgroup v2 root, to which the socket programs are attached. Default: detected.",
    )  # fmt: skip
    bpffs_root: Path = option(
        "--bpffs-root", flag_types.ABSOLUTE_PATH, "/sys/fs/bpf/ebpfproxy", _EBPF,
        "Directory on bpffs for pinned programs, maps and links.",
    )  # fmt: skip
    proc_root: Path = option(
        "--proc-root", flag_types.ABSOLUTE_PATH, "/proc", _EBPF,
        "The host's proc file system, used to find the network namespaces of pods.",
    )  # fmt: skip
    socket_lb: SocketLb = option(
        "--socket-lb", flag_types.SOCKET_LB, "on", _EBPF,
        "Sockets that are redirected to an endpoint at connect(), which costs nothing per packet. on: "
        "sockets of pods and of the host. host: sockets of the host only. off: no socket load balancing. "
        "Other connections are translated packet by packet. All values are functionally equivalent. A "
        "service mesh whose sidecars must see the Service's address needs host or off.",
    )  # fmt: skip
    tc_devices: tuple[str, ...] = option(
        "--tc-devices", flag_types.DEVICE_PATTERNS, "", _EBPF,
        "Translate packets only on network devices with these names or patterns, such as eth*, and on "
        "loopback. May be repeated. none: on no device, so that another agent can use those of this "
        "network namespace. Default: detected uplinks and tunnels, and pod devices where necessary.",
    )  # fmt: skip
    ebpf_stale_udp: str = option(
        "--ebpf-stale-udp", flag_types.one_of("reconnect", "destroy"), "reconnect", _EBPF,
        "What to do with a connected UDP socket whose endpoint is gone. reconnect: connect it to another "
        "endpoint, unnoticed by its process (needs CAP_SYS_PTRACE and Linux 5.6); otherwise translate its "
        "packets, if it is a pod's socket. destroy: the same, and destroy a socket for which both fail; "
        "its process gets ECONNABORTED and must connect again.",
    )  # fmt: skip
    ebpf_redirect: bool = option(
        "--ebpf-redirect", flag_types.BOOLEAN, "false", _EBPF,
        "Forward flows of outside clients past this node's network stack. Faster, but FORWARD rules, "
        "network policies by iptables or nftables, and conntrack do not see these flows.",
    )  # fmt: skip
    ebpf_flows_max: int = option(
        "--ebpf-flows-max", flag_types.ENTRIES, "262144", _EBPF,
        "Maximum number of established flows that are translated packet by packet. An eighth as many, at "
        "least 4096, can be half-open in addition.",
    )  # fmt: skip
    ebpf_source_ranges_max: int = option(
        "--ebpf-source-ranges-max", flag_types.ENTRIES, "65536", _EBPF,
        "Maximum number of load balancer source ranges, over all ServicePorts.",
    )  # fmt: skip
    ebpf_services_max: int = option(
        "--ebpf-services-max", flag_types.ENTRIES, "65536", _EBPF,
        "Maximum number of frontends. Each address, port and protocol of a Service is a frontend.",
    )  # fmt: skip
    ebpf_slots_max: int = option(
        "--ebpf-slots-max", flag_types.ENTRIES, "1048576", _EBPF,
        "Maximum number of endpoint slots: one for each endpoint of each ServicePort.",
    )  # fmt: skip
    ebpf_endpoints_max: int = option(
        "--ebpf-endpoints-max", flag_types.ENTRIES, "262144", _EBPF,
        "Maximum number of distinct endpoints.",
    )  # fmt: skip
    ebpf_affinity_max: int = option(
        "--ebpf-affinity-max", flag_types.ENTRIES, "65536", _EBPF,
        "Maximum number of clients with session affinity. Beyond it, the least recent client is "
        "forgotten.",
    )  # fmt: skip
    ebpf_sockets_max: int = option(
        "--ebpf-sockets-max", flag_types.ENTRIES, "262144", _EBPF,
        "Maximum number of sockets connected to a Service, per socket map.",
    )  # fmt: skip
