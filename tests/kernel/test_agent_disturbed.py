"""Foreign changes to a mode's rules, programs and devices are repaired within seconds under load.

The sync period is one hour: only the agent's frequent checks can find these changes sooner.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpfproxy.agent.reconciler import REPAIRED
from ebpfproxy.bench.load import Load
from ebpfproxy.lab import devices
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.bpf import Link
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, answers
from tests.kernel.cluster import TCP_TARGET, Cluster, Exposed, eventually
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = pytest.mark.kernel

SELDOM = ("--sync-period=1h", "--iptables-min-sync-period=0s")
PATIENCE = 60.0  # seconds; the documented limit on an idle machine is 5
TABLES = ("filter", "nat", "mangle")
STEMS = ("iptables", "ip6tables")

RELOADED = """*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:IN_public - [0:0]
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A INPUT -j IN_public
-A IN_public -p tcp -m tcp --dport 22 -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
COMMIT
"""
"""The tables' contents after a firewall reload, which replaces everything else."""

Disturbance = Callable[[Cluster, Exposed], None]


def run(cluster: Cluster, command: str, text: str = "") -> str:
    return str(cluster.node.run(command.split(), stdin=text).stdout)


# iptables: each function takes the iptables backend


def flush_everything(cluster: Cluster, web: Exposed, tool_backend: str) -> None:
    for stem in STEMS:
        for table in TABLES:
            run(cluster, f"{stem}-{tool_backend} -w -t {table} -F")
            run(cluster, f"{stem}-{tool_backend} -w -t {table} -X")


def reload_firewall(cluster: Cluster, web: Exposed, tool_backend: str) -> None:
    for stem in STEMS:
        run(cluster, f"{stem}-{tool_backend}-restore -w", RELOADED)


def edit_a_rule(cluster: Cluster, web: Exposed, tool_backend: str) -> None:
    """Replace the endpoint in a rule: no size changes."""
    to = f"--to-destination {cluster.a.v4}:{TCP_TARGET}"
    rules = run(cluster, f"iptables-{tool_backend} -w -t nat -S").splitlines()
    rule = next(rule for rule in rules if rule.endswith(to))
    chain, _, rest = rule.removeprefix("-A ").partition(" ")
    number = [rule for rule in rules if rule.startswith(f"-A {chain} ")].index(rule) + 1
    other = rest.replace(to, f"--to-destination {cluster.b.v4}:{TCP_TARGET}")
    text = f"*nat\n-R {chain} {number} {other}\nCOMMIT\n"
    run(cluster, f"iptables-{tool_backend}-restore -w --noflush", text)


def flush_ruleset(cluster: Cluster, web: Exposed, tool_backend: str = "") -> None:
    run(cluster, "nft flush ruleset")


# test_iptables_drift.py has smaller changes.
IPTABLES = [
    pytest.param(tool_backend, disturb, id=f"{tool_backend}-{disturb.__name__}")
    for tool_backend in ("legacy", "nft")
    for disturb in (flush_everything, reload_firewall, edit_a_rule)
]


# nftables


def delete_an_element(cluster: Cluster, web: Exposed) -> None:
    run(cluster, "nft -f -", f"delete element ip kube-proxy service-ips {{ {web.v4} . tcp . 80 }}\n")


def reload_nft_firewall(cluster: Cluster, web: Exposed) -> None:
    chain = "type filter hook input priority 10; policy accept; ct state established accept;"
    text = f"flush ruleset\ntable inet firewalld {{\nchain filter_INPUT {{\n{chain}\n}}\n}}\n"
    run(cluster, "nft -f -", text)


NFTABLES = [flush_ruleset, delete_an_element, reload_nft_firewall]


# ipvs


def delete_a_virtual_server(cluster: Cluster, web: Exposed) -> None:
    run(cluster, f"ipvsadm -D -t {web.v4}:80")


def delete_all_virtual_servers(cluster: Cluster, web: Exposed) -> None:
    run(cluster, "ipvsadm -C")


def delete_a_real_server(cluster: Cluster, web: Exposed) -> None:
    run(cluster, f"ipvsadm -d -t {web.v4}:80 -r {cluster.a.v4}:{TCP_TARGET}")


def set_a_real_servers_weight_to_0(cluster: Cluster, web: Exposed) -> None:
    run(cluster, f"ipvsadm -e -t {cluster.node.v4}:{web.node_port} -r {cluster.a.v4}:{TCP_TARGET} -m -w 0")


def add_a_real_server(cluster: Cluster, web: Exposed) -> None:
    run(cluster, f"ipvsadm -a -t [{web.v6}]:80 -r [{cluster.b.v6}]:{TCP_TARGET} -m")


def delete_the_device(cluster: Cluster, web: Exposed) -> None:
    run(cluster, "ip link del kube-ipvs0")


def empty_a_set(cluster: Cluster, web: Exposed) -> None:
    """The set that masquerades external clients. Without it, the endpoint's replies take another route."""
    run(cluster, "ipset flush KUBE-NODE-PORT-TCP")


def flush_rules(cluster: Cluster, web: Exposed) -> None:
    flush_everything(cluster, web, "legacy")


IPVS = [delete_a_virtual_server, delete_all_virtual_servers, delete_a_real_server, empty_a_set]
IPVS += [set_a_real_servers_weight_to_0, add_a_real_server, delete_the_device, flush_rules]


# ebpf


def detach_from_devices(cluster: Cluster, web: Exposed) -> None:
    if not tcx.is_supported():
        run(cluster, "tc qdisc del dev eth0 clsact")
    for pin in (cluster.lab.bpffs / "devices").glob("*"):
        pin.unlink()


def delete_pins(cluster: Cluster, web: Exposed) -> None:
    for path in (*cluster.lab.bpffs.glob("programs-*"), cluster.lab.bpffs / "maps"):
        shutil.rmtree(path)


def detach_links(cluster: Cluster, web: Exposed) -> None:
    for pin in (cluster.lab.bpffs / "links").iterdir():
        with contextlib.closing(Link.pinned(pin)) as link:
            link.detach()


EBPF = [detach_from_devices, delete_pins, detach_links]


def repaired(
    cluster: Cluster,
    load: Load,
    flags: tuple[str, ...],
    disturb: Disturbance,
    record: Callable[[str, object], None],
) -> None:
    """Disturb; wait until the agent has repaired, counted and logged it; then no connection may fail."""
    agent = cluster.start(*SELDOM, *flags)
    web = cluster.service(node_port=True).to(cluster.a)
    targets_of = {
        cluster.p: load.targets("inside", [(web.v4, 80)]),
        cluster.lab.outside: load.targets("outside", [(cluster.node.v4, web.node_port)]),
    }
    running = [load.start_churn(client, to, rate=100.0) for client, to in targets_of.items()]
    since, counted, began = len(agent.lines), cluster.metric("ebpfproxy_repairs_total"), time.monotonic()
    disturb(cluster, web)
    repair = agent.await_line(lambda line: REPAIRED in line.text, since, PATIENCE)
    # Only a sync after the repair counts: one for an earlier change may be logged late.
    agent.await_sync(agent.lines.index(repair), PATIENCE)
    # The agent may have repaired the first changes of `disturb` before it made the last one.
    eventually(lambda: _served(cluster, web, 1), "served again", PATIENCE)
    took = time.monotonic() - began
    assert _served(cluster, web, 10)
    failed = sum(load.end_churn(each)["failed"] for each in running)
    record("repaired_s", round(took, 2))
    record("connections_failed", failed)
    assert took < PATIENCE
    assert cluster.metric("ebpfproxy_repairs_total") > counted
    cluster.node.call(delete_untranslated)
    for client, to in targets_of.items():
        assert load.churn(client, to, count=50)["errors"] == {}


def _served(cluster: Cluster, web: Exposed, count: int) -> bool:
    """Whether `count` new connections in a row are served at each frontend, in both families."""
    frontends = [(cluster.lab.outside, of, web.node_port) for of in (cluster.node.v4, cluster.node.v6)]
    frontends += [(cluster.p, of, 80) for of in (web.v4, web.v6)]
    try:
        return all(set(answers(client, TCP, to, port, count)) == {"a"} for client, to, port in frontends)
    except OSError:
        return False


def delete_untranslated() -> None:
    """Delete the conntrack entries of connections that began while the rules were missing.

    The kernel uses such an entry for a later connection from the same port, which then times out. It is the
    same with kube-proxy.
    """
    for flow in conntrack.flows(Protocol.TCP):
        if (flow.reply_source, flow.reply_source_port) == (flow.destination, flow.destination_port):
            conntrack.delete(flow)


@pytest.mark.parametrize(("tool_backend", "disturb"), IPTABLES)
def test_foreign_changes_to_iptables_rules_are_repaired(
    restartable: Cluster,
    load: Load,
    tool_backend: str,
    disturb: Callable[[Cluster, Exposed, str], None],
    record_property: Callable[[str, object], None],
) -> None:
    flags = "--proxy-mode=iptables", f"--iptables-backend={tool_backend}"
    repaired(restartable, load, flags, lambda of, web: disturb(of, web, tool_backend), record_property)


@pytest.mark.parametrize("tool_backend", ["legacy", "nft"])
def test_a_foreign_change_during_a_repair_is_repaired(
    restartable: Cluster, tmp_path: Path, tool_backend: str
) -> None:
    """The agent once took such a change for its own: until the next sync period, connections were refused."""
    flush = tmp_path / "flush"
    restore = tmp_path / f"ip6tables-{tool_backend}-restore"  # runs last in a repair
    restore.write_text(
        f'#!/bin/sh\n{shutil.which(restore.name)} "$@"; status=$?\n'
        f"if [ -s /dev/stdin ] && rm {flush}; then iptables-{tool_backend} -w -t nat -F; fi\nexit $status\n"
    )
    restore.chmod(0o755)
    for name in (f"ip6tables-{tool_backend}", f"ip6tables-{tool_backend}-save"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    restartable.mode = "iptables"
    path = f"PATH={tmp_path}:{os.environ['PATH']}"
    agent = restartable.launch(f"--iptables-backend={tool_backend}", *SELDOM, before=("env", path))
    agent.await_sync(timeout=PATIENCE)
    web = restartable.service(node_port=True).to(restartable.a)
    flush.touch()
    for stem in STEMS:
        run(restartable, f"{stem}-{tool_backend} -w -t nat -F")
    eventually(lambda: not flush.exists(), "flushed during the repair", PATIENCE)
    eventually(lambda: _served(restartable, web, 1), "served again", PATIENCE)


@pytest.mark.parametrize("disturb", NFTABLES)
def test_foreign_changes_to_nftables_rules_are_repaired(
    restartable: Cluster, load: Load, disturb: Disturbance, record_property: Callable[[str, object], None]
) -> None:
    repaired(restartable, load, ("--proxy-mode=nftables",), disturb, record_property)


@pytest.mark.parametrize("disturb", IPVS)
def test_foreign_changes_to_ipvs_state_are_repaired(
    restartable: Cluster, load: Load, disturb: Disturbance, record_property: Callable[[str, object], None]
) -> None:
    skip_without_ipvs("ipvs")
    repaired(restartable, load, ("--proxy-mode=ipvs", "--iptables-backend=legacy"), disturb, record_property)


@pytest.mark.parametrize("disturb", EBPF)
def test_foreign_changes_to_bpf_programs_and_pins_are_repaired(
    restartable: Cluster, load: Load, disturb: Disturbance, record_property: Callable[[str, object], None]
) -> None:
    repaired(restartable, load, ("--proxy-mode=ebpf",), disturb, record_property)


def test_a_recreated_pod_device_gets_its_classifiers_again(
    restartable: Cluster, load: Load, record_property: Callable[[str, object], None]
) -> None:
    """A container runtime does this when it restarts a pod's sandbox."""
    restartable.start(*SELDOM, "--socket-lb=off")
    web = restartable.service().to(restartable.a)
    pod = restartable.lab.pod("again")
    try:
        assert set(answers(pod, TCP, web.v4, 80, 5)) == {"a"}
        restartable.lab.ip(restartable.node, f"link del {pod.device}")
        devices.connect_routed(restartable.node, restartable.lab.addresses.gateway(0), pod, pod.device)
        began = time.monotonic()
        targets = load.targets("again", [(web.v4, 80)])
        eventually(lambda: not load.churn(pod, targets, count=5)["failed"], "served again", PATIENCE)
        record_property("repaired_s", round(time.monotonic() - began, 2))
    finally:
        restartable.lab.remove_pod(pod)


@pytest.mark.parametrize("disturb", [flush_ruleset, reload_nft_firewall])
def test_mode_ebpf_serves_while_the_firewall_is_flushed_or_reloaded(
    restartable: Cluster, load: Load, disturb: Disturbance
) -> None:
    restartable.start(*SELDOM)
    web = restartable.service(node_port=True).to(restartable.a)
    targets = load.targets("steady", [(web.v4, 80)])
    running = load.start_churn(restartable.p, targets, rate=200.0)
    disturb(restartable, web)
    for tool_backend in ("legacy", "nft"):
        reload_firewall(restartable, web, tool_backend)
    assert set(answers(restartable.lab.outside, TCP, restartable.node.v4, web.node_port, 20)) == {"a"}
    assert load.end_churn(running)["errors"] == {}
