"""The table of `bench compare`, and its options."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ebpfproxy.cli.bench_compare import command, table
from ebpfproxy.errors import ConfigError
from tests.unit.bench.comparisons import comparison


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
