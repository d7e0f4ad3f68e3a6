"""Names of clients on the socket path."""

import pytest

from ebpfproxy.backends.ebpf.inspect import client_names
from ebpfproxy.backends.ebpf.inspect.client_names import ClientNames
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Address, parse_address
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel


def test_a_namespace_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def addresses() -> list[Address]:
        read.append(netns.cookie())
        if len(read) == 1:
            raise Rejected("cannot read the addresses")
        return [parse_address("192.0.2.7")]

    monkeypatch.setattr(client_names, "_addresses", addresses)
    with namespace("names"):
        names = ClientNames(0)
        names.name(0)  # unknown, so all are read
        assert names.name(read[1]) == "192.0.2.7"
