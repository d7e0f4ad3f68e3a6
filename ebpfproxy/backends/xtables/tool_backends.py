"""Selects the iptables backend of this node: legacy or nft.

If both have rules, both are in force at once, and each tool shows only its own. So an agent that starts last
must use the backend of the others. Kubernetes requires this of everything that runs in a container
(github.com/kubernetes-sigs/iptables-wrappers).
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
    ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"),  # kubelet since 1.24 and since 1.17
    (names.CANARY,),  # kube-proxy, or a previous run of the agent
)
"""Chains of the table mangle that show the backend, by the program that created them. The first match
decides.
"""


def choose(wanted: str) -> ToolBackend:
    """Return the backend `wanted`. For AUTO, return the backend that has hints, otherwise the one with more
    rules, otherwise the backend of the tool named iptables.

    AUTO only considers installed tools. No table is created in either backend. Raises Unsupported if no tool
    is installed, Rejected if reading is not permitted.
    """
    if wanted != AUTO:
        return ToolBackend(wanted)
    tools = installed()
    if not tools:
        raise Unsupported("cannot find iptables", "install it: apt-get install iptables, or apk add iptables")
    if len(tools) == 1:
        return next(iter(tools))
    return (
        _hinted(tools)
        or _with_more_rules(tools)
        or iptables.plain_tool_backend(Family.IPV4)
        or ToolBackend.NFT
    )


def installed() -> dict[ToolBackend, list[Iptables]]:
    """Return the installed tools by backend, for one family or both."""
    found: dict[ToolBackend, list[Iptables]] = {}
    for tool_backend in ToolBackend:
        for family in Family:
            try:
                found.setdefault(tool_backend, []).append(iptables.find(family, tool_backend))
            except Unsupported:
                continue
    return {tool_backend: tools for tool_backend, tools in found.items() if tools}


def _hinted(tools: Mapping[ToolBackend, list[Iptables]]) -> ToolBackend | None:
    """Return the backend with a hint. If both have one, nft is the newer one."""
    for hints in _HINTS:
        for tool_backend in (ToolBackend.NFT, ToolBackend.LEGACY):
            if any(tool.show(MANGLE, hint) for tool in tools[tool_backend] for hint in hints):
                return tool_backend
    return None


def _with_more_rules(tools: Mapping[ToolBackend, list[Iptables]]) -> ToolBackend | None:
    """Return the backend with more rules, None if both have the same number."""
    rules = {
        tool_backend: sum(tool.save().count("\n-A ") for tool in each) for tool_backend, each in tools.items()
    }
    if rules[ToolBackend.LEGACY] == rules[ToolBackend.NFT]:
        return None
    return max(rules, key=rules.__getitem__)
