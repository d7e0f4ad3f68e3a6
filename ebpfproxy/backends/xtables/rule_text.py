"""The parts of a rule's text, in the order in which iptables-save prints them: addresses, devices, protocol,
then the matches as they were given, then the target.
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
"""The tools cut what is longer than the kernel's XT_MAX_COMMENT_LEN, with its zero byte, allows."""

_MAX_DEVICE_NAME = 15
"""IFNAMSIZ without the zero byte; the + of a prefix counts, too."""

_DENOMINATOR = 1 << 31
"""The kernel keeps a probability as so many parts of this."""

REJECT = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}


def comment(text: str) -> str:
    """`text` is made of names, which hold nothing that would have to be escaped, and has a / or a blank: so
    the tools quote it."""
    return f'-m comment --comment "{text[:_MAX_COMMENT]}"'


def host(address: Address) -> str:
    """A single address, as a network: the tools print the length even then."""
    return f"{format_address(address)}/{32 if family(address) is Family.IPV4 else 128}"


def is_everything(network: Network) -> bool:
    """Whether all of its family is in it; the tools print no match for that."""
    return network.length == (V4_BITS if network_family(network) is Family.IPV4 else 0)


def source(network: Network) -> str:
    """The match of the sources in it, with a blank behind; "" for everything."""
    return "" if is_everything(network) else f"-s {format_network(network)} "


def from_pods(traffic: LocalTraffic) -> str:
    """The match of the packets of pods, with a blank behind; "" where those are all there are.

    >>> from_pods(LocalTraffic(interface="veth", prefix=True))
    '-i veth+ '
    """
    return source(traffic.network) if traffic.network else f"-i {_device(traffic)} "


def not_from_pods(traffic: LocalTraffic, destination: str = "") -> str | None:
    """The match of all packets but those of pods, to `destination` if not to any; None where there are none.

    "Not from everywhere" is something that iptables-nft rejects to write.

    >>> not_from_pods(LocalTraffic(interface="cbr0"), "10.96.0.1/32")
    '-d 10.96.0.1/32 ! -i cbr0'
    """
    dialled = [f"-d {destination}"] if destination else []
    if not traffic.network:
        return " ".join([*dialled, f"! -i {_device(traffic)}"])
    if is_everything(traffic.network):
        return None
    return " ".join([f"! {source(traffic.network).rstrip()}", *dialled])


def _device(traffic: LocalTraffic) -> str:
    """A prefix as long as a device's name can be is that name."""
    wildcard = traffic.prefix and len(traffic.interface) < _MAX_DEVICE_NAME
    return traffic.interface + "+" * wildcard


@functools.lru_cache(maxsize=4096)
def one_of(count: int) -> str:
    """The match of one connection in `count`, at random.

    kube-proxy gives ten digits after the point, the kernel keeps the nearest number that it has, and the
    tools print that with eleven.

    >>> one_of(3)
    '-m statistic --mode random --probability 0.33333333349'
    """
    parts = int(float(f"{1 / count:.10f}") * _DENOMINATOR + 0.5)
    return f"-m statistic --mode random --probability {parts / _DENOMINATOR:.11f}"


def marking_rule(mark: int) -> str:
    """KUBE-MARK-MASQ: the packet is to be masqueraded. Nothing else of its mark changes.

    >>> marking_rule(0x4000)
    '-j MARK --set-xmark 0x4000/0x4000'
    """
    return f"-j MARK --set-xmark {mark:#x}/{mark:#x}"


def masquerading_rules(mark: int, random_fully: bool) -> tuple[str, ...]:
    """KUBE-POSTROUTING. The mark is cleared before the packet is masqueraded: it may come by once more, in a
    tunnel."""
    note = comment("kubernetes service traffic requiring SNAT")
    return (
        f"-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN",
        f"-j MARK --set-xmark {mark:#x}/0x0",
        f"{note} -j MASQUERADE{' --random-fully' * random_fully}",
    )


def forwarding_rules(mark: int) -> tuple[str, ...]:
    """KUBE-FORWARD: what is marked, and what follows it, passes whatever the policy of FORWARD."""
    note = comment("kubernetes forwarding conntrack rule")
    return (
        f"{comment('kubernetes forwarding rules')} -m mark --mark {mark:#x}/{mark:#x} -j ACCEPT",
        f"{note} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )
