"""The rules of modes nftables and iptables in the kernel, compared with those that the plan renders."""

from collections.abc import Iterator, Mapping
from typing import Any

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.backends.selection import MODES
from ebpfproxy.config import Config
from ebpfproxy.diagnose.explain.result import Explanation
from ebpfproxy.diagnose.explain.situation import Situation
from ebpfproxy.model.address import format_address


class RuleFacts:
    """The differences between the kernel's entries and those of all plans, read once.

    Raises KernelError if the entries cannot be read.
    """

    def __init__(self, config: Config, situation: Situation) -> None:
        mode = next(each for each in MODES if each.name == situation.mode)
        backend = mode.prepare(config, Callbacks(lambda *_: None, lambda _: None)).backend
        self._render = backend.render
        backend.open()  # writes nothing in these modes
        try:
            actual = backend.read()
            desired = backend.render(situation.plans.values(), situation.node)
            self._delta = diff(actual, desired)
            self._actual: Mapping[Any, Any] = actual
            self._own = {key: tuple(backend.render((plan,), None)) for key, plan in situation.plans.items()}
        finally:
            backend.close()

    def differences(self, explanation: Explanation) -> list[str]:
        """Return a line for each entry of the ServicePort, or with its address, that differs."""
        return list(self._differences(explanation))

    def _differences(self, explanation: Explanation) -> Iterator[str]:
        served = explanation.served
        own = self._own.get(served.plan.key, ()) if served else ()
        for key in own:
            if key in self._delta.puts:
                state = "changed" if key in self._actual else "missing"
                yield f"{key}: {state} in the kernel"
        words = {format_address(explanation.destination.address)} if explanation.destination else set()
        if served:
            words.add(str(served.plan.name))
        for key in sorted(self._delta.drops, key=str):
            if any(word in str(key) for word in words):
                yield f"{key}: only in the kernel"
