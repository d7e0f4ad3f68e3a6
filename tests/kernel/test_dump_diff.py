"""`ebpfproxy dump --diff`, `--drift` and `dump objects` on a node that an agent served."""

import contextlib
import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.lab import Lab
from ebpfproxy.linux.bpf.bpf import Map
from tests.kernel.cluster import Cluster, Exposed
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = pytest.mark.kernel

_FLAGS = {"iptables": ("--iptables-backend=legacy",), "ipvs": ("--iptables-backend=legacy",)}
_DETECTION = ("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth")


class Served(NamedTuple):
    cluster: Cluster
    service: Exposed


@pytest.fixture(scope="module", params=["ebpf", "nftables", "iptables", "ipvs"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A node with one Service of one endpoint, served in one mode. The agent has ended."""
    skip_without_ipvs(request.param)
    with Lab("test-diff", 36) as lab, Cluster(lab, request.param) as cluster:
        cluster.start("--iptables-min-sync-period=0s", *_FLAGS.get(request.param, ()))
        service = cluster.service().to(cluster.a)
        cluster.end()
        yield Served(cluster, service)


def dump(served: Served, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    cluster = served.cluster
    flags = (
        f"--manifests={cluster.folder}",
        f"--hostname-override={cluster.lab.node_name}",
        f"--proxy-mode={cluster.mode}",
        *_DETECTION,
        *_FLAGS.get(cluster.mode, ()),
    )
    done = cluster.ebpfproxy("dump", *arguments, *flags, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_node_in_sync_has_no_difference(served: Served) -> None:
    code, output, _ = dump(served, "--diff")
    assert output.startswith(f"mode {served.cluster.mode}: no differences, "), output
    assert code == 0


def test_all_objects_are_shown_in_every_mode(served: Served) -> None:
    code, output, _ = dump(served, "objects", "-o", "json")
    assert code == 0
    assert served.cluster.a.v4 in output
    assert all(row["object"] for row in json.loads(output))


def test_entries_that_differ_are_marked(served: Served) -> None:
    if served.cluster.mode != "ebpf":
        pytest.skip("only mode ebpf has maps")
    _, output, errors = dump(served, "services", "--drift", "-o", "json")
    assert errors == ""
    assert {row["drifted"] for row in json.loads(output)} == {""}
    pin = (served.cluster.lab.bpffs / "current").resolve() / "maps" / "services"
    with contextlib.closing(Map.pinned(pin)) as services:
        key, value = min(services.items())
        *head, flags, kind, algorithm, slow_start = abi.SERVICE.unpack(value)
        services.update(
            key, abi.SERVICE.pack(*head, flags ^ abi.SERVICE_MASQUERADE_OUTSIDE, kind, algorithm, slow_start)
        )
        try:
            _, output, _ = dump(served, "services", "--drift", "-o", "json")
            marks = [row["drifted"] for row in json.loads(output)]
            assert sorted({*marks}) == ["", "different"]
            _, output, _ = dump(served, "services", "--drift")
            assert "DRIFTED" in output
            code, output, _ = dump(served, "--diff")
            signs = [line[0] for line in output.splitlines() if "frontends: " in line]
            assert (code, signs) == (1, ["-", "+"])
        finally:
            services.update(key, value)


def test_lines_with_signs_show_both_states(served: Served) -> None:
    """The Service has got another endpoint, and there is a new Service."""
    cluster, service = served
    service.to(cluster.b)
    cluster.service().to(cluster.c)
    code, output, errors = dump(served, "--diff")
    lines = output.splitlines()
    assert (code, errors) == (1, "")
    assert any(line.startswith("-") and cluster.a.v4 in line for line in lines), output
    assert any(line.startswith("+") and cluster.b.v4 in line for line in lines), output
    assert not [line for line in lines if line.startswith("-") and cluster.b.v4 in line]
    assert any(line.startswith("+") and cluster.c.v4 in line for line in lines), output
    assert " differ, " in lines[-1]
    _, text, _ = dump(served, "--diff", "-o", "json")
    found = json.loads(text)
    assert found["mode"] == cluster.mode
    assert "missing" in {each["state"] for each in found["objects"]}
    if cluster.mode == "ebpf":
        _, _, errors = dump(served, "services", "--drift")
        assert errors.startswith("note: ")
