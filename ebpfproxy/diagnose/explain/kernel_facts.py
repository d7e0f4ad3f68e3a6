"""The entries of any mode in the kernel, compared with those that the plan renders."""

from collections.abc import Iterator
from typing import Any

from ebpfproxy.backends.difference import UNEXPECTED, Difference
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.diagnose.explain.origin import EBPF
from ebpfproxy.diagnose.explain.result import Explanation, Via
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.diagnose.verify import desired, differences
from ebpfproxy.model.address import format_address

_HOOKS = ("connect", "sendmsg", "recvmsg")


class KernelFacts:
    """The differences between the kernel and all plans, read once. Raises KernelError."""

    def __init__(self, inspection: Inspection[Any, Any], situation: Situation) -> None:
        self._is_ebpf = situation.mode == EBPF
        self._found = differences(inspection, desired(inspection, situation))
        self._own: dict[object, frozenset[str]] = {}
        if self._found:
            self._own = {
                key: frozenset(map(str, inspection.render((plan,), None)))
                for key, plan in situation.plans.items()
            }

    def differences(self, explanation: Explanation) -> list[str]:
        """Return a line for each entry of the ServicePort, or with its address, that differs.

        In mode ebpf, also the hooks, if they handle the connection.
        """
        return [str(each) for each in self._concerning(explanation)]

    def _concerning(self, explanation: Explanation) -> Iterator[Difference]:
        own: frozenset[str] = frozenset()
        words: set[str] = set()
        if explanation.served:
            own = self._own.get(explanation.served.plan.key, frozenset())
            words.add(str(explanation.served.plan.name))
        if explanation.destination:
            words.add(format_address(explanation.destination.address))
        is_socket = explanation.path is not None and explanation.path.via is Via.SOCKET
        for each in self._found:
            is_named = each.state == UNEXPECTED and any(word in each.key for word in words)
            is_hook = self._is_ebpf and is_socket and each.key.startswith(_HOOKS)
            if each.key in own or is_named or is_hook:
                yield each
