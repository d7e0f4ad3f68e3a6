"""Where the agent's log is found."""

from pathlib import Path

import pytest

from ebpfproxy.diagnose.bundle import logs
from ebpfproxy.errors import NotFound
from ebpfproxy.linux import journal


@pytest.fixture(autouse=True)
def _no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "read", lambda unit, lines: "")


def _pod_log(proc: Path, pod: str, text: str) -> None:
    path = proc / "1/root/var/log/pods" / pod / "ebpfproxy" / "0.log"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_the_log_of_the_pod_is_found_in_the_namespace_of_the_first_process(tmp_path: Path) -> None:
    _pod_log(tmp_path, "kube-system_ebpfproxy-x2x_1-2-3", "Synced services\n")
    _pod_log(tmp_path, "kube-system_coredns-1_4-5-6", "other\n")
    text = logs.read_logs(tmp_path, ()).text
    assert "Synced services" in text
    assert "other" not in text


def test_the_journal_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "read", lambda unit, lines: f"from {unit}\n")
    assert logs.read_logs(tmp_path, ()).text == "==> journal of ebpfproxy <==\nfrom ebpfproxy\n"


def test_a_given_log_replaces_the_others(tmp_path: Path) -> None:
    _pod_log(tmp_path, "kube-system_ebpfproxy-x2x_1-2-3", "Synced services\n")
    given = tmp_path / "agent.log"
    given.write_text("mine")
    assert logs.read_logs(tmp_path, (given,)).text == f"==> {given} <==\nmine\n"


def test_without_a_log_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"kubectl .* --log=FILE"):
        logs.read_logs(tmp_path, ())


def test_only_the_last_lines_of_a_long_log_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST", 20)
    given = tmp_path / "agent.log"
    given.write_text("".join(f"line {number}\n" for number in range(100)))
    assert logs.read_logs(tmp_path, (given,)).text.splitlines()[1:] == ["line 98", "line 99"]
