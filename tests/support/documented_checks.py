"""Decides for each command of the documents and the help: run, checked without a cluster, or exempt.

`outcome_of` fails for a command that is none of these. Then do one of the following:

- add its program to RUN, and tests/kernel/test_documented_commands.py runs it on a node of a lab;
- add its program to CHECKS, with a function that raises AssertionError if it is wrong;
- add a pattern to EXEMPT, with the reason.
"""

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ebpfproxy import __version__
from ebpfproxy.cli import group
from ebpfproxy.config.load import load
from ebpfproxy.errors import ConfigError
from tests.cluster import __main__ as cluster
from tests.support import chart
from tests.support.documented import PLUGIN, ROOT, Command, shell_blocks, simple_commands
from tests.support.kustomize import KUBECTL, render

RUN: Sequence[tuple[str, str]] = (
    (r"nft list table ip ebpfproxy", "userspace"),
    (r"nft list (?!flowtable ).*", "nftables"),
    (r"(?:ip6?tables|iptables-save)\b.*", "iptables"),
    (r"conntrack -L .*", "iptables"),
    (r"cat /proc/net/xt_recent/.*", "iptables"),
    (r"sysctl net\.ipv4\.conf\.all\.route_localnet", "iptables"),
    (r"for t in iptables ip6tables; do .*", "iptables"),
    (r"(?:ipvsadm|ipset) .*|ip addr show kube-ipvs0|sysctl net\.ipv4\.vs .*", "ipvs"),
    (r"ip route show table local proto 235|ss -ltnup|ps -C ebpfproxy-relay", "userspace"),
    (r"ebpfproxy dump connections", "userspace"),
    (r"curl localhost:10249/rebalancing", "ebpf"),
    (r"ebpfproxy (?:cleanup|compile|completion|doctor|version)\b.*", "ebpf"),
    (r"ebpfproxy dump\b(?!.*--(?:watch|diff|drift)).*", "ebpf"),
    (r"curl -s(?:i)? '?localhost:(?:10249|10256)/.*", "ebpf"),
    (r"(?:ls|readlink) /sys/fs/bpf/ebpfproxy/.*", "ebpf"),
    (r"bpftool (?:cgroup tree|net show) ?.*", "ebpf"),
    (r"tc filter show .*|ip link show|uname -r", "ebpf"),
    (r"sysctl (?:-w )?net\.ipv4\.conf\.\S+", "ebpf"),
    (r"cat /proc/sys/net/netfilter/nf_conntrack_count", "ebpf"),
    (r"ebpfproxy explain --reasons", "ebpf"),
    (r"ebpfproxy run .*--write-config-to=/dev/stdout", "ebpf"),
)
"""Commands that are run, with the node's mode: the first pattern that matches the complete command decides.
Commands on a page of docs/dataplanes run in that page's mode."""

EXEMPT: Mapping[str, str] = {
    r"ip link set dev \S+ xdp off": "removes another owner's program: tests/kernel/test_xdp.py",
    r"vagrant .*|for m in control .*|for [in] in .* curl .*": "boots machines from boxes of the network",
    r"buildah .*": "takes minutes and a network: make test-image",
    r"cosign verify .*|docker buildx imagetools inspect .*": "need a release in a registry",
    r"kubeadm .*": "needs machines of a cluster",
    r"(?:talosctl|kops|minikube|snap|aws|az) .*": "needs a cluster of that distribution: none was tried",
    r"modprobe .*|echo ip_vs .*|grep net-pf-16.*": "needs the node's modules",
    r"ebpfproxy (?:monitor|top)\b.*|ebpfproxy dump .*--watch.*": "run until an interrupt: test_monitor.py",
    r"pip uninstall bcc|pip install .*|apt-get install .*": "changes the machine",
    r"kubectl krew .*": "needs krew: tests/deploy/test_krew.py installs what it would",
    r"bpftool map lookup pinned MAP .*": "needs the key of an entry: tests/kernel/test_raw_keys.py",
    r"git commit .*": "changes the repository: tests/unit/test_contributing.py",
    r"ip link show ebpfproxy0": "needs a start with --socket-lb=off: tests/kernel/test_reinjection.py",
    r"ip rule add from ADDRESS|ip route add SERVICE_CIDR .*": "shown as an example without effect",
    r"ip route show table all proto 235": "needs an on-link frontend: tests/kernel/test_on_link_frontends.py",
    r"(?:systemctl|journalctl) .*ebpfproxy-edge": "needs systemd: test_edge.py sends the signals",
    r"ip address show ebpfproxy-vip": "needs an edge: tests/kernel/test_edge.py",
    r"sysctl -w net\.ipv4\.fib_multipath_hash_policy=1": "is for the router: make edge-lab sets it",
    r"sysctl -w net\.bridge\.bridge-nf-call-iptables=1 .*": "needs the module: test_bridge_checks.py sets it",
    r"nft list flowtable .*|conntrack .* grep OFFLOAD": "need flowtables: tests/kernel/test_flowtable.py",
    r"ufw .*": "is not installed: its rules are those of iptables before it",
}
"""Commands that no test can run, and why."""

_KUBECTL_LOCAL = re.compile(r"\b(?:ds|daemonset)[/ ](ebpfproxy)\b")
_FILE = re.compile(r"(?<![\w/])(?:deploy|docs|tests|vagrant|bpf)/[\w./-]+")
_CLUSTER = {
    "kubectl": """
        case " $* " in
        *" get pods "*) printf 'worker-%s|pod|Running|True||\\n' 1 2 ;;
        *" exec "*) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
        esac""",
    "ebpfproxy": "printf '%s\\n' \"$@\"",
}
"""Programs in place of a cluster with the nodes worker-1 and worker-2: `ebpfproxy` prints its arguments."""
_COPIES = {"deploy/mine": "deploy/example"}
"""Folders that readers create: by path, the folder that they copy."""


def outcome_of(command: Command) -> str:
    """The mode of the node on which it is run, or "checked", or "exempt". Raises AssertionError."""
    for pattern in EXEMPT:
        if re.fullmatch(pattern, command.text):
            return "exempt"
    if mode := mode_of(command):
        if command.text.startswith("ebpfproxy"):
            check(command)
        return mode
    if command.page == "docs/quickstart.md" and any(
        command.text in text for text, _ in shell_blocks(command.page)
    ):
        return "quickstart"
    check(command)
    return "checked"


def mode_of(command: Command) -> str:
    """The mode in which a command is run; "" if it is not run."""
    for pattern, mode in RUN:
        if re.fullmatch(pattern, command.text):
            page = re.fullmatch(r"docs/dataplanes/(nftables|iptables|ipvs)\.md", command.page)
            return page[1] if page and mode != "ebpf" else mode
    return ""


def check(command: Command) -> None:
    """Check a command. Raises AssertionError with its location and a remedy."""
    for words in simple_commands(command.text):
        known = CHECKS.get(words[0].removeprefix(".venv/bin/"))
        assert known, (
            f"{command.place}: no test covers `{command.text}`; add {words[0]} to RUN, CHECKS or EXEMPT of "
            "tests/support/documented_checks.py"
        )
        try:
            known(words[1:])
        except AssertionError as error:
            raise AssertionError(f"{command.place}: `{command.text}`: {error}") from error
    for name in _FILE.findall(command.text):
        path = functools.reduce(lambda text, pair: text.replace(*pair), _COPIES.items(), name)
        assert (ROOT / path).exists(), f"{command.place}: there is no {name}"


def _ebpfproxy(words: Sequence[str]) -> None:
    """Its flags exist, and their values have the right type."""
    command: click.Command = group
    context = click.Context(group)
    rest = ["run" if word == "COMMAND" else word for word in words if word != "--help"]
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        found = command.get_command(context, name)
        assert found, f"ebpfproxy has no command {name}"
        command = found
    if isinstance(command, click.Group):
        return
    try:
        given = command.make_context(command.name, [_filled_in(word) for word in rest]).params
        if "proxy_mode" in given:
            load(given)
    except click.exceptions.Exit:
        return  # an option that shows something and exits
    except click.ClickException as error:
        raise AssertionError(error.format_message()) from None
    except ConfigError as error:
        raise AssertionError(error.message) from None


def _filled_in(word: str) -> str:
    """A number in place of N, the DaemonSet's configuration file in place of that of a node, and this file
    in place of one that the reader has."""
    word = re.sub(r"^(--kube-proxy|--from)=(?:\S+json|\S*kube-proxy)$", rf"\1={__file__}", word)
    text = word.replace("/etc/ebpfproxy/config.conf", str(ROOT / "deploy/base/config.conf"))
    return re.sub(r"(^|=)N$", r"\g<1>4", text)


def _kubectl(words: Sequence[str]) -> None:
    """The command and flags of kubectl exist, and those of ebpfproxy in a pod; the folder of -k is valid."""
    if words[0] == "ebpfproxy":
        _plugin(words[1:])
        return
    own = list(words[: words.index("--")] if "--" in words else words)
    done = subprocess.run([KUBECTL, *own, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    names = [
        entry["metadata"]["name"] for entry in render(ROOT / "deploy/base") if entry["kind"] == "DaemonSet"
    ]
    for name in _KUBECTL_LOCAL.findall(" ".join(own)):
        assert name in names
    if "--" in words:
        inner = [word for word in words[words.index("--") + 1 :] if word != "env" and "LOCKFILE=" not in word]
        assert inner[0] == "ebpfproxy", f"{inner[0]} is not in the image"
        _ebpfproxy(inner[1:])


def _plugin(words: Sequence[str]) -> None:
    """The plugin of kubectl accepts the command line, and ebpfproxy what would run in a pod."""
    if "--help" in words:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, script in _CLUSTER.items():
            program = Path(folder, name)
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        done = subprocess.run(
            [PLUGIN, *words],
            env={"PATH": f"{folder}:/usr/bin:/bin"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        written = Path(folder, "ebpfproxy-worker-1.tar.gz")
        output = written.read_text() if written.exists() else done.stdout
    command, *arguments = [line.removeprefix("worker-1: ") for line in output.splitlines()]
    if group.get_command(click.Context(group), command):
        _ebpfproxy([command, *[word for word in arguments if not word.startswith("worker-2: ")]])


@functools.cache
def _targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _make(words: Sequence[str]) -> None:
    unknown = [word for word in words if "=" not in word and word not in _targets()]
    assert not unknown, f"the Makefile has no target {unknown[0]}"
    for word in words:
        if word.startswith("CLUSTER="):
            try:
                cluster.arguments(word.partition("=")[2].split())
            except SystemExit:
                raise AssertionError(f"make test-cluster does not accept {word}") from None


def _python(words: Sequence[str]) -> None:
    """It runs pytest with options that exist, or a module of this repository."""
    own = words[: words.index("--")] if "--" in words else words
    assert own[0] == "-m"
    if own[1] == "pytest":
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--version", *own[2:]]
        done = subprocess.run(pytest, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    else:
        module = ROOT / own[1].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def _helm(words: Sequence[str]) -> None:
    """The chart exists and renders with the values of the files and flags. A release's has an image."""
    action, name, folder, *rest = words
    assert (action, name) == ("install", "ebpfproxy")
    is_release = folder == "oci://ghcr.io/OWNER/charts/ebpfproxy"
    assert is_release or ROOT / folder == chart.CHART
    values: dict[str, Any] = {"image": {"repository": "ghcr.io/owner/repository"}} if is_release else {}
    for flag, value in zip(rest[::2], rest[1::2], strict=True):
        match flag:
            case "--namespace":
                continue
            case "--version":
                assert is_release
                assert value == __version__
            case "-f":
                values |= chart.example(ROOT / value)
            case "--set":
                path, _, text = value.partition("=")
                section, _, key = path.partition(".")
                values.setdefault(section, {})[key] = text
            case _:
                raise AssertionError(f"unknown flag {flag}")
    try:
        chart.render(values)
    except chart.Rejected as failure:
        raise AssertionError(failure) from failure


def _any(_words: Sequence[str]) -> None:
    """Not checked: a common tool in a pipe or with files."""


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "ebpfproxy": _ebpfproxy,
    "helm": _helm,
    "kubectl": _kubectl,
    "make": _make,
    "python": _python,
    "grep": _any,
    "wc": _any,
    "cp": _any,
}
"""By program: the check of a command that cannot be run. Raises AssertionError."""
