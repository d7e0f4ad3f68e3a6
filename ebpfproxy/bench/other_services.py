"""Services that no client uses, besides the Service under test. Their endpoints change at a given rate."""

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.bench import workload
from ebpfproxy.bench.source import Source, manifest_path
from ebpfproxy.lab import Netns, manifests
from ebpfproxy.lab.netns import Call

_FIRST = 10
"""The index of the first one. The Services under test have lower ones."""
_CHANGING_MAX = 100
"""The number of Services that change. In the folder of manifests each has a file of its own."""


_SUBSTITUTES = workload.NETWORK.num_addresses // 2
"""The index of the first address that replaces another one."""


class OtherServices:
    """`count` Services with `endpoints` endpoints each. No server answers at their addresses."""

    def __init__(self, folder: Path, count: int, endpoints: int) -> None:
        """Write them to the folder of manifests."""
        self._changing = min(count, _CHANGING_MAX)
        self._endpoints = endpoints
        if not count:
            return
        constant = _FIRST + self._changing
        workload.write(folder, count - self._changing, endpoints, first=constant)
        for value in workload.services(self._changing, first=_FIRST):
            manifests.write(manifest_path(folder, value), value)
        for number in range(self._changing):
            value = self.changed(number)
            manifests.write(manifest_path(folder, value), value)

    def start_changes(self, node: Netns, source: Source, per_second: float) -> "Changes":
        """Change an endpoint `per_second` times per second, until `Changes.end`. 0: never."""
        return Changes(node, source, self.changed, per_second if self._changing else 0.0)

    def reset(self, node: Netns, source: Source) -> None:
        """Write the first state of all that changed."""

        def write_all() -> None:
            write = source.writer()
            for number in range(self._changing):
                write(self.changed(number))

        node.call(write_all)

    def changed(self, number: int) -> manifests.Object:
        """Return the slice of change `number`. Changes go round the Services; in each turn, another endpoint
        is replaced. There are no replaced ones in the first turn, from 0."""
        turn, place = divmod(number, self._changing)
        index = _FIRST + place
        addresses = workload.addresses_of(index, self._endpoints)
        if turn:
            addresses[turn % self._endpoints] = workload.endpoint_address(_SUBSTITUTES + 2 * place + turn % 2)
        return workload.endpoint_slice(index, addresses)


class Changes:
    """A process that makes changes at a constant rate."""

    def __init__(
        self, node: Netns, source: Source, slice_of: Callable[[int], manifests.Object], per_second: float
    ) -> None:
        self._call: Call[tuple[int, float]] | None = None
        if not per_second:
            return
        reading, self._ending = os.pipe()

        def make() -> tuple[int, float]:
            """Return the number of changes and the seconds that they took."""
            os.close(self._ending)
            write, began, number = source.writer(), time.monotonic(), 0
            while True:
                due = began + (number + 1) / per_second
                if select.select([reading], [], [], max(0.0, due - time.monotonic()))[0]:
                    return number, time.monotonic() - began
                number += 1
                write(slice_of(number))

        self._call = node.start(make)
        os.close(reading)

    def end(self) -> float | None:
        """End the changes. Return their number per second; None if there were none."""
        if self._call is None:
            return None
        os.close(self._ending)
        number, seconds = self._call.result()
        return number / seconds
