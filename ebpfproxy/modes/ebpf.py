"""Mode ebpf."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.config import Config
from ebpfproxy.config.derived import ebpf_settings, plan_context
from ebpfproxy.dataplanes.ebpf import probes, removal, trial
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfDataplane
from ebpfproxy.dataplanes.ebpf.retirement import Retirement
from ebpfproxy.dataplanes.findings import Finding
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.kernel import mounts
from ebpfproxy.model.address import Family
from ebpfproxy.modes.mode import Callbacks, Parts
from ebpfproxy.plan.devices import NO_DEVICES


class EbpfMode:
    """See `Mode`."""

    name = "ebpf"
    uses_kernel_nat = False

    def probe(self, config: Config) -> tuple[Finding, ...]:
        packets = config.tc_devices != NO_DEVICES
        return probes.probe(config.bpffs_root, config.cgroup_root, packets)

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return (trial.try_out(),)

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        root = config.cgroup_root or mounts.cgroup_root_of_all()
        dataplane = EbpfDataplane(
            ebpf_settings(config, root),
            callbacks.sockets_counted,
            pods_bypass=callbacks.pods_bypass,
            filters_changed=callbacks.changed,
        )
        return Parts(
            dataplane,
            plan_context(config, self.name),
            owns_namespace=config.tc_devices != NO_DEVICES,
            usage=dataplane.usage,
            counters=dataplane.counters,
            traffic=dataplane.traffic,
            bypassed=dataplane.bypassed,
            lacking=dataplane.lacking,
            is_notified=dataplane.is_notified,
        )

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return removal.remove(config.bpffs_root, _cgroup_root(config), dry_run)

    def retire(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        """What these programs translate the kernel knows nothing of."""
        return Retirement(config.bpffs_root, _cgroup_root(config)).step()


def _cgroup_root(config: Config) -> Path | None:
    """None where it is not to be found: it is needed only where the kernel has no links."""
    if config.cgroup_root is None:
        with contextlib.suppress(EbpfProxyError):
            return mounts.host_cgroup2_root()
    return config.cgroup_root
