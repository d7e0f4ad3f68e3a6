"""The entries of any mode in the kernel, or in a saved dump, compared with those that the plan renders."""

import re
from collections.abc import Iterator
from typing import Any

from ebpfproxy.backends.difference import UNEXPECTED, Difference, compare, text
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.diagnose.explain.origin import EBPF, Origin
from ebpfproxy.diagnose.explain.result import ClientClass, Explanation, Via
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.diagnose.verify import desired
from ebpfproxy.model.address import format_address
from ebpfproxy.plan.service_plan import DeviceRole

_HOOKS = ("connect", "sendmsg", "recvmsg")
_UPLINKS = (DeviceRole.UPLINK, DeviceRole.TUNNEL)


class KernelFacts:
    """The differences between the kernel and all plans, read once. Raises KernelError."""

    def __init__(self, inspection: Inspection[Any, Any], situation: Situation) -> None:
        self._is_ebpf = situation.mode == EBPF
        self._planned = situation.node.devices
        actual, wanted = inspection.read(), desired(inspection, situation)
        self._found = [*compare(actual, wanted, inspection.shown), *inspection.further()]
        self._unexpected = {
            str(key): text(inspection.shown(key, actual[key])) for key in actual.keys() - wanted.keys()
        }
        self._own: dict[object, frozenset[str]] = {}
        if self._found:
            self._own = {
                key: frozenset(map(str, inspection.render((plan,), None)))
                for key, plan in situation.plans.items()
            }

    def differences(self, explanation: Explanation, origin: Origin) -> list[str]:
        """Return a line for each entry of the ServicePort, or with its address, that differs.

        In mode ebpf, also the hooks or the devices that handle the connection.
        """
        return [str(each) for each in self._concerning(explanation, origin)]

    def _concerning(self, explanation: Explanation, origin: Origin) -> Iterator[Difference]:
        own: frozenset[str] = frozenset()
        words: set[str] = set()
        if explanation.served:
            own = self._own.get(explanation.served.plan.key, frozenset())
            words.add(str(explanation.served.plan.name))
        if explanation.destination:
            words.add(format_address(explanation.destination.address))
        devices = self._devices(explanation, origin)
        is_socket = explanation.path is not None and explanation.path.via is Via.SOCKET
        for each in self._found:
            is_hook = self._is_ebpf and is_socket and each.key.startswith(_HOOKS)
            if each.key in own or each.key in devices or is_hook:
                yield each
            elif each.state == UNEXPECTED:
                content = self._unexpected.get(each.key, "")
                if f" {explanation.destination} " in content:
                    yield each._replace(detail=content)
                elif any(_is_named(word, each.key) for word in words):
                    yield each

    def _devices(self, explanation: Explanation, origin: Origin) -> frozenset[str]:
        """Return the keys of the devices with the programs that handle packets of the connection."""
        if not self._is_ebpf or explanation.path is None or explanation.path.via is not Via.PACKET:
            return frozenset()
        if origin.kind is ClientClass.POD:
            names = [each.name for each in self._planned if each.name == origin.interface]
        else:
            names = [each.name for each in self._planned if each.role in _UPLINKS]
        side = "egress" if origin.kind is ClientClass.NODE else "ingress"
        return frozenset(key for name in names for key in (f"device {name}", f"device {name} {side}"))


def _is_named(name: str, key: str) -> bool:
    """Return whether a key has the address, or the name of a Service or ServicePort, not only within a longer
    one.

    >>> _is_named("10.96.0.1", "element 10.96.0.10 . tcp"), _is_named("10.96.0.1", "10.96.0.1:80/TCP")
    (False, True)
    >>> _is_named("fd00::1", "listener [fd00::1]:80/TCP"), _is_named("fd00::1", "element fd00::1:2 . tcp")
    (True, False)
    """
    after = "[\\w.:-]" if ":" in name and "/" not in name else "[\\w.-]"
    return re.search(rf"(?<![\w.:-]){re.escape(name)}(?!{after})", key) is not None
