"""What backends that use the kernel's NAT do beside syncs."""

import threading

import pytest

from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.config import Config


def test_a_backend_that_is_closed_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysctls, "apply", lambda wanted: None)
    before = set(threading.enumerate())
    backend = NftablesBackend().serves(Config(hostname_override="here"), Callbacks())
    backend.opened()
    (searching,) = set(threading.enumerate()) - before
    backend.close()
    assert not searching.is_alive()
    backend.close()


@pytest.mark.parametrize("localhost", [True, False])
def test_loopback_is_routed_once_the_guard_is_in_force_if_node_ports_answer_there(
    localhost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2020-8558: without the guard, other machines would reach 127.0.0.1."""
    applied: list[object] = []
    monkeypatch.setattr(sysctls, "apply", applied.append)
    config = Config(hostname_override="here", iptables_localhost_nodeports=localhost)
    backend = IptablesBackend(IptablesSettings()).serves(config, Callbacks())
    backend.in_force(lambda: (), lambda guard: False)
    assert not applied
    for _ in range(2):
        backend.in_force(lambda: (), lambda guard: True)
    assert applied == [(sysctls.ROUTE_LOCALNET,)] * localhost
