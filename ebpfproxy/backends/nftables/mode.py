"""The definition of mode nftables."""

from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from typing import Any

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.mode import BackendInspection, Callbacks, Inspection, Parts
from ebpfproxy.backends.netfilter import families_used
from ebpfproxy.backends.netfilter.sync_hooks import NetfilterHooks, netfilter_settings
from ebpfproxy.backends.netfilter.tracked_protocols import sctp_is_unserved
from ebpfproxy.backends.nftables import cleanup, probes
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import Element, Endpoints, Key, endpoint_bytes
from ebpfproxy.backends.nftables.node_objects import (
    NO_ENDPOINT_NODE_PORTS,
    NO_ENDPOINT_SERVICES,
    SERVICE_IPS,
    SERVICE_NODE_PORTS,
)
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.nftables.shares import DRAWS
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family, Protocol, parse_address, unspecified
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.service_plan import Frontend


class NftablesMode:
    """Implements `Mode`."""

    name = "nftables"
    uses_kernel_nat = True
    balancing = Support(frozenset(DRAWS), weights=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(families_used.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        backend = NftablesBackend(nftables_settings(config))
        sync_hooks = NetfilterHooks(netfilter_settings(config, self.name), callbacks, frontends)
        context = plan_context(config, self.name, sctp_is_unserved())
        return Parts(backend, context, sync_counts=backend.counts, sync_hooks=sync_hooks)

    def inspect(self, config: Config) -> Inspection:
        backend = NftablesBackend(nftables_settings(config))
        backend.open()
        return BackendInspection(backend, plan_context(config, self.name, sctp_is_unserved()), shown)

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return (cleanup.remove_beside_kube_proxy if beside_kube_proxy else cleanup.remove)(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def nftables_settings(config: Config) -> NftablesSettings:
    return NftablesSettings(masquerade_bit=config.iptables_masquerade_bit)


_IPV4 = 4  # bytes of an address


def shown(key: Key, entry: Any) -> Any:
    """Return an entry for readers: a list of endpoints as texts.

    >>> from ebpfproxy.model.address import Family
    >>> shown(Endpoints(Family.IPV4, bytes(8)), bytes([10, 0, 0, 1, 0, 80, 0, 0]) + bytes(8))
    ('10.0.0.1:80', '')
    """
    if not isinstance(key, Endpoints):
        return entry
    size = endpoint_bytes(key.family)
    return tuple(_endpoint_text(entry[at : at + size]) for at in range(0, len(entry), size))


def _endpoint_text(packed: bytes) -> str:
    """Address and port, "" for a place without an element."""
    if not any(packed):
        return ""
    address, port = packed[:-4], int.from_bytes(packed[-4:-2], "big")
    return f"{ip_address(address)}:{port}" if len(address) == _IPV4 else f"[{ip_address(address)}]:{port}"


_WITH_ADDRESS = {SERVICE_IPS, NO_ENDPOINT_SERVICES}
_WITHOUT_ADDRESS = {SERVICE_NODE_PORTS, NO_ENDPOINT_NODE_PORTS}


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """Yield the frontends that elements translate, reject or drop, including those of a previous run or of
    kube-proxy.

    >>> from ebpfproxy.model.address import Family
    >>> keys = (
    ...     Element(Family.IPV4, "service-ips", "10.96.0.1 . udp . 53"),
    ...     Element(Family.IPV6, "no-endpoint-nodeports", "udp . 30053"),
    ...     Element(Family.IPV4, "cluster-ips", "10.96.0.1"),
    ... )
    >>> [str(each) for each in frontends(keys)]
    ['10.96.0.1:53/UDP', '[::]:30053/UDP']
    """
    for key in keys:
        if not isinstance(key, Element):
            continue
        words = key.key.split(" . ")
        if key.container in _WITHOUT_ADDRESS:
            words.insert(0, "")
        elif key.container not in _WITH_ADDRESS:
            continue
        address, name, port = words
        protocol = Protocol.__members__.get(name.upper())
        if protocol:
            destination = parse_address(address) if address else unspecified(key.family)
            yield Frontend(destination, int(port), protocol)
