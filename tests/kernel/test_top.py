"""The rates of real connections, and the command with --once."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.inspect.rates import Rates
from tests.kernel.clients import REFUSED, TCP, outcome
from tests.kernel.cluster import Cluster

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf")]


def test_connections_and_errors_are_counted_by_service_and_endpoint(cluster: Cluster) -> None:
    web, empty = cluster.service().to(cluster.a), cluster.service().to()
    with contextlib.closing(Rates(cluster.lab.bpffs)) as rates:
        before = time.monotonic()
        rates.take()
        began = time.monotonic()
        for _ in range(6):
            assert outcome(cluster.p, TCP, web.v4, 80) == "a"
        for _ in range(3):
            assert outcome(cluster.p, TCP, empty.v4, 80) == REFUSED
        ended = time.monotonic()
        found = rates.take()
        after = time.monotonic()
    by_service = {row.service: row for row in found.services}
    served, rejected = by_service[f"default/{web.name}:tcp"], by_service[f"default/{empty.name}:tcp"]

    def is_rate_of(count: int, rate: float) -> bool:
        """Both samples were taken at unknown times within calls. A rate is rounded to one digit."""
        return count / (after - before) - 0.06 <= rate <= count / (ended - began) + 0.06

    assert (served.errors, served.bytes) == (0, None)
    assert is_rate_of(6, served.connections)
    assert rejected.connections == 0
    assert is_rate_of(3, rejected.errors)
    (endpoint,) = (row for row in found.endpoints if row.service == served.service)
    assert (endpoint.endpoint, endpoint.connections) == (f"{cluster.a.v4}:8080", served.connections)
    assert found.lost == (0, 0)


def test_bytes_of_the_packet_path_are_shown_if_they_are_counted(restartable: Cluster) -> None:
    restartable.start("--ebpf-traffic-max=64")
    web = restartable.service(node_port=True).to(restartable.a)
    with contextlib.closing(Rates(restartable.lab.bpffs, f"default/{web.name}")) as rates:
        assert outcome(restartable.lab.outside, TCP, restartable.node.v4, web.node_port) == "a"
        (row,) = rates.take().services
    assert row.service == f"default/{web.name}:tcp"
    assert row.bytes
    assert row.connections


@contextlib.contextmanager
def running(cluster: Cluster, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """The command. It is killed at the end of the block, unless it has ended."""
    command = [sys.executable, "-m", "ebpfproxy", "top", f"--bpffs-root={cluster.lab.bpffs}", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("output", ["table", "json"])
def test_the_command_prints_one_sample(cluster: Cluster, output: str) -> None:
    web = cluster.service().to(cluster.a)
    flags = ("--once", "--interval=3", "-o", output, f"--service=default/{web.name}")
    with running(cluster, *flags) as process:
        while process.poll() is None:
            outcome(cluster.p, TCP, web.v4, 80)
            time.sleep(0.1)
        text, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    if output == "json":
        found = json.loads(text)
        assert [row["service"] for row in found["services"]] == [f"default/{web.name}:tcp"]
        assert [row["endpoint"] for row in found["endpoints"]] == [f"{cluster.a.v4}:8080"]
        assert found["services"][0]["connections"] > 0
    else:
        assert "CONNECTIONS/S" in text
        assert f"{cluster.a.v4}:8080" in text


def test_the_live_view_needs_a_terminal(cluster: Cluster) -> None:
    with running(cluster) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "hint: add --once" in errors
