"""Load balancing of a Service: the algorithm, the weights of endpoints, and slow start.

Kubernetes has no fields for these. They are annotations of a Service (docs/load-balancing.md).
"""

import enum
from typing import NamedTuple

from ebpfproxy.model.address import Network, network, parse_address, parse_network

MAX_WEIGHT = 100
"""The greatest weight of an endpoint. Weights are relative, so more steps are not needed."""
MAX_RULES = 1000
"""Of a Service. An annotation may have 256 kB, and they are evaluated at each change of the Service."""

_SINGLE = 128
"""The length of a network that is a single address."""


class Algorithm(enum.Enum):
    """How an endpoint is selected for a new connection."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    SOURCE_HASH = "source-hash"
    MAGLEV = "maglev"
    LEAST_CONNECTIONS = "least-connections"

    __hash__ = object.__hash__  # faster than Enum.__hash__, which is written in Python


IPVS_NAMES = {
    "rr": Algorithm.ROUND_ROBIN,
    "wrr": Algorithm.ROUND_ROBIN,
    "lc": Algorithm.LEAST_CONNECTIONS,
    "wlc": Algorithm.LEAST_CONNECTIONS,
    "sh": Algorithm.SOURCE_HASH,
    "mh": Algorithm.MAGLEV,
}
"""The IPVS schedulers that are synonyms. Weights apply where they are set, so rr and wrr are the same."""

ALGORITHM_NAMES = (*(each.value for each in Algorithm), *IPVS_NAMES)
"""All names of algorithms."""


class Forwarding(enum.Enum):
    """How mode ipvs forwards packets to real servers."""

    NAT = "nat"
    DIRECT_ROUTING = "direct-routing"
    TUNNEL = "tunnel"

    __hash__ = object.__hash__


class EbpfForwarding(enum.Enum):
    """How mode ebpf forwards packets of outside clients to endpoints on other nodes.

    SNAT translates source and destination. DSR (direct server return) sends the packet unchanged in a tunnel
    to the endpoint's node, which replies to the client directly.
    """

    SNAT = "snat"
    DSR = "dsr"

    __hash__ = object.__hash__


class WeightRule(NamedTuple):
    """The weight of endpoints on `node`, or with an address in `network` if `node` is ""."""

    node: str
    network: Network | None
    weight: int


class Balancing(NamedTuple):
    """What a Service requests.

    - `algorithm`: None for the default of this node.
    - `weights`: the first rule that matches an endpoint counts. An endpoint without one has weight 1.
    - `slow_start`: in seconds, 0 without slow start, None for the default of this node.
    - `forwarding`: only for mode ipvs. None for the default of this node.
    - `ebpf_forwarding`: only for mode ebpf. None for the default of this node.
    """

    algorithm: Algorithm | None = None
    weights: tuple[WeightRule, ...] = ()
    slow_start: int | None = None
    forwarding: Forwarding | None = None
    ebpf_forwarding: EbpfForwarding | None = None


DEFAULT_BALANCING = Balancing()
"""A Service without annotations. One object for all of them."""


class TooManyRules(ValueError):
    """A Service has more than MAX_RULES rules."""


def parse_algorithm(text: str) -> Algorithm:
    """Parse the name of an algorithm or of an IPVS scheduler. Raises ValueError.

    >>> parse_algorithm("mh").value
    'maglev'
    """
    if text in IPVS_NAMES:
        return IPVS_NAMES[text]
    try:
        return Algorithm(text)
    except ValueError:
        raise ValueError(f'"{text}" is not one of {", ".join(ALGORITHM_NAMES)}') from None


def parse_weights(text: str) -> tuple[WeightRule, ...]:
    """Parse rules such as ``node:worker-1=3, 10.244.1.7=2, 10.244.0.0/16=0``, in order. Raises ValueError,
    which is TooManyRules beyond MAX_RULES.

    >>> [(rule.node, rule.weight) for rule in parse_weights("node:a=3, 10.0.0.0/8=0")]
    [('a', 3), ('', 0)]
    """
    words = [word.strip() for word in text.split(",", MAX_RULES + 1)]
    if len(words) > MAX_RULES + 1 or len([word for word in words if word]) > MAX_RULES:
        raise TooManyRules(f"there are more than {MAX_RULES} rules")
    return tuple(_weight_rule(word) for word in words if word)


def _weight_rule(text: str) -> WeightRule:
    subject, equals, number = text.rpartition("=")
    subject, number = subject.strip(), number.strip()
    if not equals or not number.isascii() or not number.isdigit() or int(number) > MAX_WEIGHT:
        raise ValueError(f'"{text}" does not end with = and a weight from 0 to {MAX_WEIGHT}')
    if subject.startswith("node:"):
        node = subject.removeprefix("node:").strip()
        if not node:
            raise ValueError(f'"{text}" names no node')
        return WeightRule(node, None, int(number))
    try:
        matched = parse_network(subject) if "/" in subject else network(parse_address(subject), _SINGLE)
        return WeightRule("", matched, int(number))
    except ValueError:
        raise ValueError(f'"{subject}" is neither node:NAME nor an IP address or CIDR') from None
