"""Which frontends rules are about, be they a previous run's or kube-proxy's. Pure."""

import re
from collections.abc import Iterable, Iterator

from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import Key, Rule
from ebpfproxy.model.address import Protocol, parse_address, unspecified
from ebpfproxy.plan.service_plan import Frontend

_CHAINS = {names.SERVICES, names.EXTERNAL_SERVICES, names.NODE_PORTS}
_DIALLED = re.compile(
    r"(?:-d (?P<address>[0-9a-f.:]+)/\d+ )?-p (?P<protocol>\w+) .*--dport (?P<port>\d+) -j "
)


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """What is translated, rejected or dropped by rules in the chains that all Services share.

    >>> from ebpfproxy.model.address import Family
    >>> texts = ("-d 10.96.0.1/32 -p udp -m udp --dport 53 -j A", "-p udp -m udp --dport 30053 -j A", "-j A")
    >>> [str(each) for each in frontends(Rule(Family.IPV4, "nat", names.SERVICES, text) for text in texts)]
    ['10.96.0.1:53/UDP', '0.0.0.0:30053/UDP']
    """
    for key in keys:
        if isinstance(key, Rule) and key.chain in _CHAINS:
            found = _DIALLED.match(key.text)
            protocol = Protocol.__members__.get(found["protocol"].upper()) if found else None
            if found and protocol:
                address = found["address"]
                dialled = parse_address(address) if address else unspecified(key.family)
                yield Frontend(dialled, int(found["port"]), protocol)
