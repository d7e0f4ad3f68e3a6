"""The definition of mode userspace, and what it requires of this machine."""

import errno
from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.userspace import addresses, redirects
from ebpfproxy.backends.userspace.backend import UserspaceBackend
from ebpfproxy.backends.userspace.inspection import UserspaceInspection
from ebpfproxy.backends.userspace.relay.balancer import ALGORITHMS
from ebpfproxy.backends.userspace.settings import userspace_settings
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import capabilities
from ebpfproxy.linux.netlink import local_routes
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, parse_address
from ebpfproxy.plan.balancing import Support

_ADDRESSES = (parse_address("10.96.0.1"), parse_address("fd00:10:96::1"))


def probe() -> tuple[Finding, ...]:
    """Return the findings. Without CAP_NET_ADMIN the mode serves NodePorts only, so `auto` does not select
    it, but it can be selected explicitly.
    """
    found = capabilities.capabilities()
    if capabilities.NET_ADMIN not in found:
        remedy = "run as root, or with CAP_NET_ADMIN"
        missing = "the capability is missing; the mode would serve only addresses that this node has"
        return (Finding(capabilities.NET_ADMIN, errno.EPERM, missing, remedy),)
    return (_routes(), _low_ports(found), _redirects())


def _routes() -> Finding:
    """Change nothing if network namespaces are missing: then it is not known, and counts as present."""
    feature = "local routes"
    try:
        with netns.throw_away():
            return _tried(feature)
    except KernelError:
        return Finding(feature)


def _tried(feature: str) -> Finding:
    netns.set_loopback_up()
    for failure in local_routes.change(_ADDRESSES[:1]).values():
        number = getattr(failure.__cause__, "errno", None) or errno.EOPNOTSUPP
        return Finding(feature, number, failure.message, failure.hint)
    return Finding(feature)


def _redirects() -> Finding:
    feature = "redirects to relays"
    try:
        lacking = redirects.probe()
    except KernelError as failure:
        lacking = failure
    if lacking is None:
        return Finding(feature)
    return Finding(
        feature,
        getattr(lacking.__cause__, "errno", None) or errno.EOPNOTSUPP,
        f"host processes cannot listen at all addresses at the port of a Service ({lacking.message})",
        f"modprobe -a {' '.join(redirects.MODULES)}",
        needed=False,
        modules=redirects.MODULES,
    )


def _low_ports(found: frozenset[str]) -> Finding:
    if capabilities.NET_BIND_SERVICE in found:
        return Finding(capabilities.NET_BIND_SERVICE)
    return Finding(
        capabilities.NET_BIND_SERVICE,
        errno.EPERM,
        "Services with ports below 1024 are not served",
        "run as root, or with CAP_NET_BIND_SERVICE",
        needed=False,
        preferred=True,
    )


_SCTP_UNSERVED = "mode userspace relays TCP and UDP only"


class UserspaceMode(Mode):
    name = "userspace"
    uses_kernel_nat = False
    balancing = Support(frozenset(ALGORITHMS), weights=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probe()

    def serve(self, config: Config, callbacks: Callbacks) -> UserspaceBackend:
        backend = UserspaceBackend(userspace_settings(config), callbacks.changed)
        backend.context = plan_context(config, self.name, _SCTP_UNSERVED)
        return backend

    def inspect(self, config: Config) -> UserspaceInspection:
        return UserspaceInspection(plan_context(config, self.name, _SCTP_UNSERVED))

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return addresses.remove(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return addresses.remove(), False
