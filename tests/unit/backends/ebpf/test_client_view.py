"""Session affinity as `ebpfproxy dump` shows it: times, order, and entries of removed Services."""

import time
from typing import cast

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow, affinity
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.model.address import parse_address

TIMEOUT = 600
PRESENT, REMOVED = 3, 7
"""Service ids. No frontend has the second one."""


def shown(*entries: tuple[str, int, float]) -> list[AffinityRow]:
    """The rows of affinities with this client, service id and age in seconds."""
    service = {"id": PRESENT, "affinity_timeout": TIMEOUT}
    empty = abi.SERVICE.unpack(bytes(abi.SERVICE.size))
    fields = zip((field.name for field in abi.SERVICE.fields), empty, strict=True)
    now = time.monotonic_ns()
    maps = {
        "services": {b"": abi.SERVICE.pack(*(service.get(name, value) for name, value in fields))},
        "affinity": {
            abi.AFFINITY_KEY.pack(parse_address(client), id_, abi.CLIENT_ADDRESS): abi.AFFINITY.pack(
                now - int(age * 1e9), 5, 0
            )
            for client, id_, age in entries
        },
    }
    return affinity(cast(Maps, maps), "service {}".format, "endpoint {}".format, lambda *_: "")


def test_affinities_in_force_are_shown_the_most_recent_first() -> None:
    rows = shown(("10.0.0.1", PRESENT, 500), ("10.0.0.2", PRESENT, TIMEOUT), ("10.0.0.3", PRESENT, 20))
    assert [(row.client, round(row.age, -1), row.timeout) for row in rows] == [
        ("10.0.0.3", 20, TIMEOUT),
        ("10.0.0.1", 500, TIMEOUT),
    ]


def test_an_affinity_of_a_removed_service_is_shown_without_a_timeout() -> None:
    (row,) = shown(("10.0.0.1", REMOVED, TIMEOUT))
    assert (row.service, row.endpoint, row.timeout) == (f"service {REMOVED}", "endpoint 5", 0)
