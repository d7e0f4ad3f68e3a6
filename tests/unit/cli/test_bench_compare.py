"""The progress and the table of `bench compare`."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ebpfproxy.bench.steps import Reached
from ebpfproxy.cli.bench_compare import Shown, command, table
from ebpfproxy.errors import ConfigError
from tests.unit.bench.comparisons import comparison


def test_progress_without_a_terminal_is_a_line_for_each_twentieth_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Shown(terminal=False) as shown:
        for number in range(1001):
            shown(Reached(number / 1000, None if not number else 90.0, f"step {number}"))
    lines = capsys.readouterr().err.splitlines()
    assert 20 <= len(lines) <= 22
    assert lines[0] == "0%, step 0"
    assert lines[1] == "5%, 1 min 30 s left, step 50"


def test_progress_on_a_terminal_shows_the_step_and_the_remaining_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Shown(terminal=True) as shown:
        shown(Reached(0.5, 90.0, "halfway"))
    shown_text = capsys.readouterr().err
    assert "halfway" in shown_text
    assert "1 min 30 s left" in shown_text


def test_the_table_has_a_row_for_each_metric_and_size_with_the_ratios(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = comparison()
    Console(width=170).print(table(found))
    out = capsys.readouterr().out
    (row,) = (line.split() for line in out.splitlines() if line.split()[:2] == ["connect_us", "1,000"])
    assert row[3:5] == ["1.10", "(1.10–1.10)"]


def test_a_kube_proxy_in_the_current_folder_is_found_without_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kube-proxy").write_text("#!/bin/sh\necho something else\n")
    (tmp_path / "kube-proxy").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    arguments = ["--kube-proxy=kube-proxy", "--modes=kube-proxy-iptables", "--cases=startup", "--services=1"]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, ConfigError)
    binary = re.escape(str(tmp_path / "kube-proxy"))
    assert re.fullmatch(
        rf"{binary} is not kube-proxy: --version prints 'something else'", str(result.exception)
    )
