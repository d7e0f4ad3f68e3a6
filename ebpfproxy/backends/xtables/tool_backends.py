"""Which flavour of iptables this node goes by.

The rules of both are in force at once where both have some, and each tool shows its own. So an agent that
comes last has to use what the others use, as Kubernetes asks of everything that runs in a container of its
own (github.com/kubernetes-sigs/iptables-wrappers).
"""

from collections.abc import Mapping

from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import MANGLE
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Flavour, Iptables
from ebpfproxy.model.address import Family

AUTO = "auto"

_HINTS = (
    ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"),  # of the kubelet, since 1.24 and since 1.17
    (names.CANARY,),  # of kube-proxy, or of a former run of ours
)
"""Chains of the table mangle that tell, by who made them; the first of these counts."""


def choose(wanted: str) -> Flavour:
    """`wanted`: the flavour, or AUTO for the one in which there are hints; where there are none, the one that
    has more rules; and where both have as many, the one of the tool that is called just iptables.

    Only what is installed counts with AUTO. It makes no table in either. Raises Unsupported where nothing is
    installed, Rejected where we may not read.
    """
    if wanted != AUTO:
        return Flavour(wanted)
    tools = installed()
    if not tools:
        raise Unsupported("there is no iptables here", "apt-get install iptables, or apk add iptables")
    if len(tools) == 1:
        return next(iter(tools))
    return _hinted(tools) or _fuller(tools) or iptables.plain_flavour(Family.IPV4) or Flavour.NFT


def installed() -> dict[Flavour, list[Iptables]]:
    """What tools there are, by flavour, for one family or both."""
    found: dict[Flavour, list[Iptables]] = {}
    for flavour in Flavour:
        for family in Family:
            try:
                found.setdefault(flavour, []).append(iptables.find(family, flavour))
            except Unsupported:
                continue
    return {flavour: tools for flavour, tools in found.items() if tools}


def _hinted(tools: Mapping[Flavour, list[Iptables]]) -> Flavour | None:
    """Where both have a hint, it is nft's that is the newer one."""
    for hints in _HINTS:
        for flavour in (Flavour.NFT, Flavour.LEGACY):
            if any(tool.show(MANGLE, hint) for tool in tools[flavour] for hint in hints):
                return flavour
    return None


def _fuller(tools: Mapping[Flavour, list[Iptables]]) -> Flavour | None:
    rules = {flavour: sum(tool.save().count("\n-A ") for tool in each) for flavour, each in tools.items()}
    if rules[Flavour.LEGACY] == rules[Flavour.NFT]:
        return None
    return max(rules, key=rules.__getitem__)
