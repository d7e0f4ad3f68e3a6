"""Completion: what is offered, and what bash, zsh and fish make of it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpfproxy import cli
from tests.support.missing import need
from tests.support.shell import SHELLS, Shell


@pytest.fixture
def offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """Returns the words that can follow a line, or the type of a path in angle brackets."""

    def of(line: str) -> list[str]:
        monkeypatch.setenv("_EBPFPROXY_COMPLETE", "bash_complete")
        monkeypatch.setenv("_EBPFPROXY_LINE", line)
        with contextlib.suppress(SystemExit):
            cli.main([])
        written = capsys.readouterr()
        assert not written.err
        rows = [row.split("\t") for row in written.out.splitlines() if row]
        return [value if kind == "plain" else f"<{kind}>" for kind, value, _ in rows]

    return of


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ebpfproxy ", list(cli.COMMANDS)),
        ("ebpfproxy do", ["doctor"]),
        ("ebpfproxy run --proxy-m", ["--proxy-mode"]),
        ("ebpfproxy run --proxy-mode ", ["auto", "ebpf", "nftables", "iptables", "ipvs", "userspace"]),
        ("ebpfproxy run --proxy-mode=ip", ["--proxy-mode=iptables", "--proxy-mode=ipvs"]),
        ("ebpfproxy run --masquerade-all --proxy-mode=n", ["--proxy-mode=nftables"]),
        ("ebpfproxy run --sync-period=5s --socket-lb ", ["on", "host", "off"]),
        ("ebpfproxy run --config ", ["<file>"]),
        ("ebpfproxy run --config=/et", ["<file>"]),
        ("ebpfproxy run --manifests ", ["<dir>"]),
        ("ebpfproxy run --no-such-flag --proxy-mode=n", ["--proxy-mode=nftables"]),
        ("ebpfproxy dump con", ["conntrack", "connections"]),
        ("ebpfproxy dump -o ", ["table", "wide", "json", "yaml"]),
        ("ebpfproxy dump 'unclosed", []),
        ("ebpfproxy compile --output ", ["<dir>"]),
        ("ebpfproxy bench con", ["connect"]),
        (
            "ebpfproxy bench connect --modes=none,nft",
            ["--modes=none,nftables", "--modes=none,nftables-flowtable"],
        ),
        ("ebpfproxy bench connect --modes iptables-", ["iptables-legacy", "iptables-nft"]),
        ("ebpfproxy completion f", ["fish"]),
        ("", list(cli.COMMANDS)),
    ],
)
def test_what_is_offered(offered: Callable[[str], list[str]], line: str, words: list[str]) -> None:
    found = offered(line)
    assert [word for word in found if not word.startswith("-") or "=" in word or "-m" in word] == words


def test_services_that_cannot_be_read_are_left_out_silently(
    offered: Callable[[str], list[str]], tmp_path: Path
) -> None:
    assert offered(f"ebpfproxy dump --bpffs-root={tmp_path} --service=") == []


def test_a_completion_loads_only_the_command_that_is_typed() -> None:
    program = (
        "import sys; from ebpfproxy.cli import main\n"
        "try: main([])\n"
        "finally: print(*sorted(sys.modules), file=sys.stderr)"
    )
    for line in ("ebpfproxy ", "ebpfproxy run --proxy-mode="):
        given = {"_EBPFPROXY_COMPLETE": "bash_complete", "_EBPFPROXY_LINE": line}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=True,
        )
        loaded = set(done.stderr.split())
        assert "ebpfproxy.cli.completion" in loaded
        assert not loaded & {"rich", "msgspec", "yaml", "kubernetes", "pyroute2", "ebpfproxy.cli.bench"}


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("ebpfproxy doct", ["doctor"]),
        ("ebpfproxy run --proxy-mode=nf", ["run", "--proxy-mode=nftables"]),
        ("ebpfproxy run --config conf", ["run", "--config", "config file.yaml"]),
        pytest.param(
            "ebpfproxy run --proxy-mode nf", ["run", "--proxy-mode", "nftables"], marks=pytest.mark.long
        ),
        pytest.param(
            "ebpfproxy run --sync-period=5s --proxy-mode=nf",
            ["run", "--sync-period=5s", "--proxy-mode=nftables"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "ebpfproxy run --config=conf", ["run", "--config=config file.yaml"], marks=pytest.mark.long
        ),
        ("ebpfproxy run --manifests=fol", ["run", "--manifests=folder"]),
    ],
)
def test_a_shell_completes(name: str, line: str, arguments: list[str], tmp_path: Path) -> None:
    need(name)
    (tmp_path / "config file.yaml").touch()
    (tmp_path / "folder").mkdir()
    completed = Shell(name, tmp_path).complete(line)
    assert [word.removesuffix("/") for word in completed] == arguments  # zsh removes the slash of a folder
