"""A node with the IPVS backend."""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.netns import netns
from tests.kernel.ipvs_backend.testbed import NODE_ADDRESS, ONE, TWO, bring, run


@pytest.fixture
def _node() -> Iterator[None]:
    """The calling thread is in a separate network namespace with the endpoints' addresses."""
    with netns.throw_away():
        try:
            ipvs.available()
        except Unsupported as lack:
            pytest.skip(lack.message)
        for command in (
            "link set lo up",
            *(f"addr add {address}/32 dev lo" for address in (ONE, TWO, NODE_ADDRESS)),
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield


@pytest.fixture
def plane(_node: None) -> Iterator[IpvsBackend]:
    with run() as made:
        bring(made)
        yield made
