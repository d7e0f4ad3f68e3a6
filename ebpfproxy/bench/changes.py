"""A Service whose only endpoint changes, and the client that measures how long a change takes."""

import math
import time
from pathlib import Path

from ebpfproxy.bench import workload
from ebpfproxy.bench.source import Write, manifest_path
from ebpfproxy.lab import manifests, sockets
from ebpfproxy.model.address import Protocol

_POLL = 0.0002
"""Seconds between two connection attempts: less than the measured durations, without using up a CPU."""

SPACING = 0.1
"""Seconds between two changes, at least, so that each is synced separately."""


class ChangingSlice:
    """The slice of the Service with index `service`. Its endpoint is one of those from index `first` on."""

    def __init__(self, service: int, first: int) -> None:
        self.service = service
        self._first = first

    def address(self, number: int) -> str:
        """Return the address of the endpoint `first` + `number`."""
        return workload.endpoint_address(self._first + number)

    def at(self, number: int) -> manifests.Object:
        """Return the slice with only this endpoint."""
        return workload.endpoint_slice(self.service, [self.address(number)])

    def write(self, folder: Path) -> None:
        """Write the Service and its slice, at endpoint 0, to files of their own."""
        for value in (*workload.services(1, first=self.service), self.at(0)):
            manifests.write(manifest_path(folder, value), value)


def change_all(
    changing: ChangingSlice,
    write: Write,
    changes: int,
    spacing: float,
    limit: float = math.inf,
    *,
    warm_up: int = 0,
) -> list[float]:
    """Change the endpoint `changes` times, `spacing` seconds apart. Runs in the client.

    First change it `warm_up` times without measuring. From then on, no change begins after `limit` seconds.

    Return milliseconds from the begin of each change (the file is replaced, or the API server gets the
    object) to a connection that reaches the new endpoint.
    """
    durations: list[float] = []
    due = time.monotonic()
    end = math.inf
    for number in range(1, warm_up + changes + 1):
        if number == warm_up + 1:
            end = time.monotonic() + limit
        if time.monotonic() >= end:
            break
        due = max(due + spacing, time.monotonic() + SPACING)
        time.sleep(due - time.monotonic())
        began = time.monotonic()
        write(changing.at(number))
        while answering_endpoint(changing.service) != changing.address(number):
            time.sleep(_POLL)
        if number > warm_up:
            durations.append((time.monotonic() - began) * 1000)
    return durations


def await_answer(service: int) -> float:
    """Wait for the first answer of the Service; return the time of time.monotonic(). Runs in the client."""
    while answering_endpoint(service) is None:
        time.sleep(_POLL)
    return time.monotonic()


def answering_endpoint(service: int, timeout: float = 0.1) -> str | None:
    """Return the address of the endpoint that answers; None without an answer. Runs in the client.

    Without a Service, `timeout` (in seconds) is what an attempt may take: the kernel limits the rate of ICMP
    errors.
    """
    try:
        with sockets.dial(
            Protocol.TCP, workload.cluster_ip(service), workload.PORT, timeout=timeout
        ) as connection:
            connection.sendall(b"w")
            return connection.recv(64).decode() or None
    except OSError:
        return None
