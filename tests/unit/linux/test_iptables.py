"""Which tools of iptables are found, and how their output is handled, with scripts in their place."""

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux import tools
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.linux.xtables.iptables import LinesRejected, ToolBackend
from ebpfproxy.model.address import Family

V4 = Family.IPV4
LEGACY, NFT, OLD = "iptables v1.8.9 (legacy)", "iptables v1.8.9 (nf_tables)", "iptables v1.6.2"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Create tools with these names that report this version. `save` and `restore`: their scripts."""
    monkeypatch.setattr(tools, "FOLDERS", str(tmp_path))

    def made(name: str, version: str, restore: str = "", save: str = "") -> None:
        for suffix, body in (("", f"echo '{version}'"), ("-save", save), ("-restore", restore)):
            file = tmp_path / f"{name}{suffix}"
            file.write_text(f"#!/bin/sh\n{body}\n")
            file.chmod(0o755)

    return made


def test_a_tool_with_the_backend_in_its_name_is_preferred_to_the_plain_one(install: Install) -> None:
    install("iptables", "iptables v1.6.2")
    install("iptables-legacy", LEGACY)
    assert iptables.find(V4, ToolBackend.LEGACY).version == "1.8.9"


@pytest.mark.parametrize(
    ("version", "tool_backend"),
    [(LEGACY, ToolBackend.LEGACY), (NFT, ToolBackend.NFT), (OLD, ToolBackend.LEGACY)],
)
def test_a_plain_tool_has_the_backend_that_it_reports(
    version: str, tool_backend: ToolBackend, install: Install
) -> None:
    install("iptables", version)
    assert iptables.plain_tool_backend(V4) is tool_backend
    assert iptables.find(V4, tool_backend).tool_backend is tool_backend
    (other,) = set(ToolBackend) - {tool_backend}
    with pytest.raises(Unsupported, match=f"cannot find iptables of the iptables backend {other}"):
        iptables.find(V4, other)


def test_an_incomplete_set_of_tools_is_not_found(install: Install, tmp_path: Path) -> None:
    install("iptables", LEGACY)
    (tmp_path / "iptables-restore").unlink()
    assert iptables.plain_tool_backend(V4) is None


def test_without_any_tool_the_hint_says_what_to_install(install: Install) -> None:
    with pytest.raises(Unsupported) as failure:
        iptables.find(Family.IPV6, ToolBackend.NFT)
    assert "apt-get install iptables" in failure.value.hint


def test_the_message_of_a_tool_is_the_reason(install: Install) -> None:
    install("iptables", LEGACY, save="echo 'iptables-save v1.8.9 (legacy): Cannot: it rains' >&2; exit 1")
    with pytest.raises(KernelError, match=r"^iptables-legacy cannot read the tables: Cannot: it rains$"):
        iptables.find(V4, ToolBackend.LEGACY).save()


def test_a_tool_without_a_message_is_reported_with_its_exit_status(install: Install) -> None:
    install("iptables", LEGACY, save="exit 7")
    with pytest.raises(KernelError, match="exit status 7"):
        iptables.find(V4, ToolBackend.LEGACY).save()


def test_a_tool_that_crashes_is_reported_with_its_signal(install: Install) -> None:
    install("iptables", LEGACY, save="kill -SEGV $$")
    with pytest.raises(KernelError, match="killed by SIGSEGV"):
        iptables.find(V4, ToolBackend.LEGACY).save()


def test_without_permission_the_hint_says_run_as_root(install: Install) -> None:
    said = "echo 'iptables-save v1.8.9 (legacy): Cannot initialize: Permission denied (you must be root)' >&2"
    install("iptables", LEGACY, save=f"{said}; exit 4")
    with pytest.raises(Rejected) as failure:
        iptables.find(V4, ToolBackend.LEGACY).save()
    assert "run as root" in failure.value.hint


def test_a_tool_that_hangs_is_killed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "TIMEOUT", 0.2)
    install("iptables", LEGACY, save="exec sleep 600")
    with pytest.raises(KernelError, match="timed out after"):
        iptables.find(V4, ToolBackend.LEGACY).save()


def test_tools_run_with_english_messages(install: Install) -> None:
    install("iptables", LEGACY, save='echo "$LC_ALL"')
    assert iptables.find(V4, ToolBackend.LEGACY).save() == "C\n"


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        ("", {}),
        ("Ignoring deprecated --wait-interval option.\n", {}),
        (
            "iptables-restore v1.8.9 (legacy): Couldn't load target `X':No such file or directory\n\n"
            "Error occurred at line: 7\nTry `iptables-restore -h' or ... for more information.\n",
            {7: "Couldn't load target `X':No such file or directory"},
        ),
        (
            "iptables-nft-restore v1.8.9 (nf_tables): \n"
            "line 3: RULE_APPEND failed (Invalid argument): rule in chain A\n"
            "line 14: RULE_APPEND failed (Invalid argument): rule in chain B\n",
            {
                3: "RULE_APPEND failed (Invalid argument): rule in chain A",
                14: "RULE_APPEND failed (Invalid argument): rule in chain B",
            },
        ),
        ("iptables-nft-restore: line 2 failed: Chain already exists.\n", {2: "Chain already exists."}),
        ("Bad argument `foo'\nError occurred at line: 2\n", {2: "Bad argument `foo'"}),
    ],
)
def test_rejected_lines_are_found_in_the_messages(errors: str, lines: dict[int, str]) -> None:
    assert iptables.rejected_lines(errors) == lines


def test_a_rejection_contains_the_line_number_and_its_text(install: Install) -> None:
    install("iptables", NFT, restore="grep -q . || exit 0; echo 'line 2: no' >&2; exit 4")
    with pytest.raises(LinesRejected, match="iptables-nft rejected line 2, :ONE - : no"):
        iptables.find(V4, ToolBackend.NFT).restore("*nat\n:ONE - \nCOMMIT\n")


def test_a_text_is_read_completely_despite_an_alarm(install: Install, tmp_path: Path) -> None:
    """iptables-legacy sets it while it waits for the lock, and does not cancel it."""
    given = tmp_path / "given"
    install("iptables", LEGACY, restore=f"[ -p /dev/stdin ] && exit 1; cat >{given}")
    text = "*nat\n" + "-A ONE -j ACCEPT\n" * 100_000 + "COMMIT\n"
    iptables.find(V4, ToolBackend.LEGACY).restore(text)
    assert given.read_text() == text


def test_a_tool_that_cannot_show_its_version_at_the_moment_is_not_missing(install: Install) -> None:
    """Found by fault injection: the family was not served until the agent was restarted."""
    install("iptables", "'; exit 4; '")
    with pytest.raises(KernelError) as failure:
        iptables.find(V4, ToolBackend.LEGACY)
    assert not isinstance(failure.value, Unsupported)


def test_a_tool_that_cannot_start_at_the_moment_is_not_missing(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("iptables", LEGACY)
    tool = iptables.find(V4, ToolBackend.LEGACY)

    def fails(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(Rejected, match="cannot start"):
        tool.save()


def test_a_kernel_without_ip_tables_has_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = legacy._INTERFACES[V4]._replace(names=tmp_path / "ip_tables_names")
    monkeypatch.setitem(legacy._INTERFACES, V4, place)
    assert legacy.tables(V4) == frozenset()
    assert legacy.fingerprint(V4, "nat") == b""
