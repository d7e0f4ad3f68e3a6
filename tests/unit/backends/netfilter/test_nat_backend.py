"""What backends that use the kernel's NAT do beside syncs."""

import threading

import pytest

from ebpfproxy.backends.interface import Callbacks
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
