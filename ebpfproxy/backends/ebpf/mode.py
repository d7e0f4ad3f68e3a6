"""Mode ebpf: creates the backend and its settings from the configuration, and tests the BPF programs."""

import contextlib
import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.backends.connection_resets import pace
from ebpfproxy.backends.ebpf import cleanup, features, probes
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings, FlowTimeouts
from ebpfproxy.backends.ebpf.drain import Drain
from ebpfproxy.backends.ebpf.entries import ALGORITHMS, SLOW_START, Entry, Key
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES, MapSizes
from ebpfproxy.backends.ebpf.programs import available_hooks, object_file, specs, xdp_spec
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Inspection, Mode
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.errors import EbpfProxyError, KernelError, ProgramRejected
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf.bpf import errno_of
from ebpfproxy.linux.bpf.loader import loaded
from ebpfproxy.linux.bpf.xdp import Mode as XdpMode
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.devices import NO_DEVICES

log = Logger(__name__)

NO_TUNNELS = "Direct server return is unavailable"
"""This node neither sends nor accepts tunneled packets, and does not announce it. Tried again at the next
start."""

PROGRAMS = "the BPF programs"
"""The feature of the finding of `load_programs`."""


class EbpfMode(Mode):
    name = "ebpf"
    uses_kernel_nat = False
    balancing = Support(frozenset(ALGORITHMS), weights=True, slow_start=SLOW_START, dsr=True, resets=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        packets = config.tc_devices != NO_DEVICES
        found = probes.probe(config.bpffs_root, config.cgroup_root, packets, xdp_mode(config))
        return (*found, probes.tunnels(config.ebpf_dsr_port)) if config.ebpf_dsr_port else found

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return (load_programs(xdp_mode(config)),)

    def serve(self, config: Config, callbacks: Callbacks) -> EbpfBackend:
        config = _with_available(config, report=True)
        root = config.cgroup_root or mounts.cgroup_root_of_all()
        backend = EbpfBackend(ebpf_settings(config, root), callbacks)
        backend.context = plan_context(config, self.name)
        backend.owns_namespace = config.tc_devices != NO_DEVICES
        return backend

    def inspect(self, config: Config) -> Inspection[Key, Entry]:
        from ebpfproxy.backends.ebpf.inspect.inspection import EbpfInspection

        config = _with_available(config, report=False)
        root = config.cgroup_root or mounts.cgroup_root_of_all()
        return EbpfInspection(ebpf_settings(config, root), plan_context(config, self.name))

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return cleanup.remove(config.bpffs_root, _cgroup_root(config), dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        """Ignores `translates`: conntrack does not contain the connections that these programs translate."""
        return Drain(config.bpffs_root, _cgroup_root(config), config.proc_root).step()


def _with_available(config: Config, report: bool) -> Config:
    """Return the configuration without direct server return if this node cannot have it.

    `report`: log why.
    """
    if not config.ebpf_dsr_port:
        return config
    finding = probes.tunnels(config.ebpf_dsr_port)
    if finding.present:
        return config
    if report:
        log.error(NO_TUNNELS, reason=finding.missing, hint=finding.remedy)
    return dataclasses.replace(config, ebpf_dsr_port=0)


def load_programs(xdp: XdpMode | None = None) -> Finding:
    """Whether the kernel loads every program. It takes about 1 s, and 4 s more without an object file.

    `xdp`: the mode of the XDP program. None: there is none.

    It pins and attaches nothing. The maps are small, since maps of full size would take the memory of an
    agent's maps a second time. The verifier does not depend on their sizes.
    """
    try:
        numbers = COMPILED_SIZES.numbers() | features.numbers(features.present())
        wanted = *specs(available_hooks()), *([xdp_spec(xdp)] if xdp else [])
        with loaded(object_file(), wanted, numbers):
            return Finding(PROGRAMS)
    except ProgramRejected as failure:
        return _finding(failure, failure.errno)
    except KernelError as failure:
        return _finding(failure, errno_of(failure))


def _finding(failure: KernelError, number: int) -> Finding:
    return Finding(PROGRAMS, number or errno.EINVAL, failure.message, failure.hint)


def _cgroup_root(config: Config) -> Path | None:
    """The root of cgroup v2; None if it cannot be found. It is only needed if the kernel has no cgroup
    links."""
    if config.cgroup_root is None:
        with contextlib.suppress(EbpfProxyError):
            return mounts.host_cgroup2_root()
    return config.cgroup_root


def ebpf_settings(config: Config, cgroup_root: Path) -> EbpfSettings:
    """The settings of the backend. `cgroup_root`: from `config`, or found if `config` has none."""
    return EbpfSettings(
        cgroup_root=cgroup_root,
        bpffs_root=config.bpffs_root,
        proc_root=config.proc_root,
        sizes=_sizes(config),
        socket_lb=config.socket_lb,
        timeouts=_timeouts(config),
        redirect=config.ebpf_redirect,
        xdp=xdp_mode(config),
        devices=config.tc_devices != NO_DEVICES,
        destroy_stale_sockets=config.ebpf_stale_udp == "destroy",
        dsr_port=config.ebpf_dsr_port,
        resets=pace(config),
    )


def xdp_mode(config: Config) -> XdpMode | None:
    """The mode of the XDP program. None if there is none."""
    return None if config.ebpf_xdp == "off" else XdpMode(config.ebpf_xdp)


def _sizes(config: Config) -> MapSizes:
    return MapSizes(
        services=config.ebpf_services_max,
        slots=config.ebpf_slots_max,
        endpoints=config.ebpf_endpoints_max,
        affinity=config.ebpf_affinity_max,
        sockets=config.ebpf_sockets_max,
        flows=config.ebpf_flows_max,
        source_ranges=config.ebpf_source_ranges_max,
        traffic=config.ebpf_traffic_max,
    )


def _timeouts(config: Config) -> FlowTimeouts:
    """A value of 0 selects the default. kube-proxy leaves the kernel's timeout unchanged then."""
    default = FlowTimeouts()
    return FlowTimeouts(
        tcp_established=config.conntrack_tcp_timeout_established or default.tcp_established,
        tcp_close_wait=config.conntrack_tcp_timeout_close_wait or default.tcp_close_wait,
        udp=config.conntrack_udp_timeout or default.udp,
        udp_stream=config.conntrack_udp_timeout_stream or default.udp_stream,
    )
