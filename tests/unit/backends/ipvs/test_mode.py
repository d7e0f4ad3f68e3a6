"""Mode ipvs between syncs."""

import pytest

from ebpfproxy.backends.ipvs.endpoint_networks import EndpointNetworks
from ebpfproxy.backends.ipvs.mode import IpvsMode
from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.config import Config


def test_endpoints_lose_what_ended_connections_kept_without_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[EndpointNetworks] = []
    monkeypatch.setattr(EndpointNetworks, "release", lambda self: released.append(self))
    callbacks = Callbacks(stale_removed=lambda ended, failed: None, pods_bypass=lambda devices: None)
    IpvsMode().prepare(Config(hostname_override="here"), callbacks).maintain()
    assert len(released) == 1
