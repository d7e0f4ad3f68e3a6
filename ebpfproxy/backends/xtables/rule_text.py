"""Parts of the text of a rule, in the order of iptables-save: addresses, devices, protocol, then the matches
in the given order, then the target.
"""

import functools

from ebpfproxy.model.address import (
    V4_BITS,
    Address,
    Family,
    Network,
    family,
    format_address,
    format_network,
    network_family,
)
from ebpfproxy.plan.service_plan import LocalTraffic

_MAX_COMMENT = 255
"""The tools truncate longer comments: the kernel's XT_MAX_COMMENT_LEN is 256 with the zero byte."""

_MAX_DEVICE_NAME = 15
"""IFNAMSIZ without the zero byte. The + of a prefix also counts."""

_DENOMINATOR = 1 << 31
"""The kernel stores a probability as a multiple of one part in this."""

REJECT = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}


def comment(text: str) -> str:
    """Return the comment match. `text` must contain a / or a blank, so that the tools quote it, and nothing
    to escape.
    """
    return f'-m comment --comment "{text[:_MAX_COMMENT]}"'


def host(address: Address) -> str:
    """Return an address as a network with its length, which the tools print even for a single address."""
    return f"{format_address(address)}/{32 if family(address) is Family.IPV4 else 128}"


def is_everything(network: Network) -> bool:
    """Return whether the network covers its complete family. The tools print no match for it."""
    return network.length == (V4_BITS if network_family(network) is Family.IPV4 else 0)


def source(network: Network) -> str:
    """Return the match of the sources in a network, with a trailing blank; "" if it covers everything."""
    return "" if is_everything(network) else f"-s {format_network(network)} "


def from_pods(traffic: LocalTraffic) -> str:
    """Return the match of packets from pods, with a trailing blank; "" if all packets are from pods.

    >>> from_pods(LocalTraffic(interface="veth", prefix=True))
    '-i veth+ '
    """
    return source(traffic.network) if traffic.network else f"-i {_device(traffic)} "


def not_from_pods(traffic: LocalTraffic, destination: str = "") -> str | None:
    """Return the match of packets that are not from pods, to `destination` if given. None if there are no
    such packets.

    iptables-nft rejects a rule "not from everywhere".

    >>> not_from_pods(LocalTraffic(interface="cbr0"), "10.96.0.1/32")
    '-d 10.96.0.1/32 ! -i cbr0'
    """
    destinations = [f"-d {destination}"] if destination else []
    if not traffic.network:
        return " ".join([*destinations, f"! -i {_device(traffic)}"])
    if is_everything(traffic.network):
        return None
    return " ".join([f"! {source(traffic.network).rstrip()}", *destinations])


def _device(traffic: LocalTraffic) -> str:
    """Return the interface match. A prefix of the maximum length of a name is that name."""
    wildcard = traffic.prefix and len(traffic.interface) < _MAX_DEVICE_NAME
    return traffic.interface + "+" * wildcard


@functools.lru_cache(maxsize=4096)
def one_of(count: int) -> str:
    """Return the match of one connection in `count`, selected at random.

    kube-proxy writes ten decimals, the kernel stores the nearest number that it can represent, and the tools
    print it with eleven decimals.

    >>> one_of(3)
    '-m statistic --mode random --probability 0.33333333349'
    """
    parts = int(float(f"{1 / count:.10f}") * _DENOMINATOR + 0.5)
    return f"-m statistic --mode random --probability {parts / _DENOMINATOR:.11f}"


def marking_rule(mark: int) -> str:
    """Return the rule of KUBE-MARK-MASQ, which marks a packet for masquerading. Other bits of the mark do not
    change.

    >>> marking_rule(0x4000)
    '-j MARK --set-xmark 0x4000/0x4000'
    """
    return f"-j MARK --set-xmark {mark:#x}/{mark:#x}"


def masquerading_rules(mark: int, random_fully: bool) -> tuple[str, ...]:
    """Return the rules of KUBE-POSTROUTING. They clear the mark before masquerading, since a tunneled packet
    passes again.
    """
    note = comment("kubernetes service traffic requiring SNAT")
    return (
        f"-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN",
        f"-j MARK --set-xmark {mark:#x}/0x0",
        f"{note} -j MASQUERADE{' --random-fully' * random_fully}",
    )


def forwarding_rules(mark: int) -> tuple[str, ...]:
    """Return the rules of KUBE-FORWARD: marked packets, and packets of known connections, pass whatever the
    policy of FORWARD.
    """
    note = comment("kubernetes forwarding conntrack rule")
    return (
        f"{comment('kubernetes forwarding rules')} -m mark --mark {mark:#x}/{mark:#x} -j ACCEPT",
        f"{note} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )
