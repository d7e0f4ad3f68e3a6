"""Mode ipvs between syncs."""

import pytest

from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.endpoint_networks import EndpointNetworks
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.backends.ipvs.mode import IpvsMode
from ebpfproxy.config import Config


def test_endpoints_lose_what_ended_connections_kept_without_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[EndpointNetworks] = []
    monkeypatch.setattr(EndpointNetworks, "release", lambda self: released.append(self))
    callbacks = Callbacks(stale_removed=lambda ended, failed: None, pods_bypass=lambda devices: None)
    IpvsMode().serve(Config(hostname_override="here"), callbacks).maintain()
    assert len(released) == 1


def test_a_search_that_takes_long_is_repeated_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, searches = 1000.0, 0

    def release(self: EndpointNetworks) -> None:
        nonlocal now, searches
        now += 0.1
        searches += 1

    monkeypatch.setattr(EndpointNetworks, "release", release)
    backend = IpvsBackend(IpvsSettings(), clock=lambda: now)
    backend.maintain()
    now += 9.0
    backend.maintain()
    assert searches == 1
    now += 2.0
    backend.maintain()
    assert searches == 2
