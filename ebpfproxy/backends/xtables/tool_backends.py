"""Which iptables backend this node goes by.

The rules of both are in force at once where both have some, and each tool shows its own. So an agent that
comes last has to use what the others use, as Kubernetes asks of everything that runs in a container of its
own (github.com/kubernetes-sigs/iptables-wrappers).
"""

from collections.abc import Mapping

from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import MANGLE
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.model.address import Family

AUTO = "auto"

_HINTS = (
    ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"),  # of the kubelet, since 1.24 and since 1.17
    (names.CANARY,),  # of kube-proxy, or of a previous run of ours
)
"""Chains of the table mangle that tell, by who made them; the first of these counts."""


def choose(wanted: str) -> ToolBackend:
    """`wanted`: the backend, or AUTO for the one in which there are hints; where there are none, the one that
    has more rules; and where both have as many, the one of the tool that is called just iptables.

    Only what is installed counts with AUTO. It makes no table in either. Raises Unsupported where nothing is
    installed, Rejected where we may not read.
    """
    if wanted != AUTO:
        return ToolBackend(wanted)
    tools = installed()
    if not tools:
        raise Unsupported("there is no iptables here", "apt-get install iptables, or apk add iptables")
    if len(tools) == 1:
        return next(iter(tools))
    return _hinted(tools) or _fuller(tools) or iptables.plain_tool_backend(Family.IPV4) or ToolBackend.NFT


def installed() -> dict[ToolBackend, list[Iptables]]:
    """What tools there are, by backend, for one family or both."""
    found: dict[ToolBackend, list[Iptables]] = {}
    for tool_backend in ToolBackend:
        for family in Family:
            try:
                found.setdefault(tool_backend, []).append(iptables.find(family, tool_backend))
            except Unsupported:
                continue
    return {tool_backend: tools for tool_backend, tools in found.items() if tools}


def _hinted(tools: Mapping[ToolBackend, list[Iptables]]) -> ToolBackend | None:
    """Where both have a hint, it is nft's that is the newer one."""
    for hints in _HINTS:
        for tool_backend in (ToolBackend.NFT, ToolBackend.LEGACY):
            if any(tool.show(MANGLE, hint) for tool in tools[tool_backend] for hint in hints):
                return tool_backend
    return None


def _fuller(tools: Mapping[ToolBackend, list[Iptables]]) -> ToolBackend | None:
    rules = {
        tool_backend: sum(tool.save().count("\n-A ") for tool in each) for tool_backend, each in tools.items()
    }
    if rules[ToolBackend.LEGACY] == rules[ToolBackend.NFT]:
        return None
    return max(rules, key=rules.__getitem__)
