"""Which frontends virtual servers are about, be they a previous run's or kube-proxy's. Pure."""

from collections.abc import Iterable, Iterator

from ebpfproxy.backends.ipvs.entries import Key, Server
from ebpfproxy.plan.service_plan import Frontend


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """What is translated.

    >>> from ebpfproxy.backends.ipvs.entries import Local
    >>> from ebpfproxy.model.address import Family, Protocol, parse_address
    >>> address = parse_address("10.96.0.1")
    >>> dns = Server(Family.IPV4, Frontend(address, 53, Protocol.UDP))
    >>> [str(each) for each in frontends([dns, Local(Family.IPV4, address)])]
    ['10.96.0.1:53/UDP']
    """
    return (key.frontend for key in keys if isinstance(key, Server))
