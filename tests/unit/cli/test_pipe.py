"""Every command ends in the same way if nothing reads its output any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebpfproxy import cli
from ebpfproxy.backends.ebpf.inspect.saved import new_header
from ebpfproxy.cli.dump_sections import SECTIONS
from ebpfproxy.cli.rows import WRITERS
from ebpfproxy.errors import CLOSED
from ebpfproxy.lab import manifests
from tests.support.documented import ROOT


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with manifests, and with a saved dump of many networks."""
    manifests.write(tmp_path / "web.yaml", manifests.service("web", ["10.96.0.10"], [manifests.port(80)]))
    rows = [{"network": f"10.0.{n}.0/24", "local": True, "node_ports": False} for n in range(250)]
    sections = {**{name: [] for name in SECTIONS}, "networks": rows}
    capsys.readouterr()
    WRITERS["json"](sections.items(), True, new_header("node", "ebpf")._asdict())
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dump.json").write_text(capsys.readouterr().out)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "version",
        "version -o=json",
        "--help",
        "dump --help",
        "explain --reasons",
        "completion bash",
        "dump networks --from-dump=saved/dump.json",
        "dump all -o=json --from-dump=saved/dump.json",
        "dump networks -o=yaml --from-dump=saved/dump.json",
        "explain default/web --manifests=. --assume-node=node",
        "explain default/web --manifests=. --assume-node=node -o=json",
        "verify --manifests=. --from-dump=saved/dump.json",
        "verify --manifests=. --from-dump=saved/dump.json -o=json",
    ],
)
def test_closed_output_ends_a_command_with_141_and_without_an_error(folder: Path, words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ebpfproxy", *words.split()],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (CLOSED, "")


def test_a_broken_pipe_of_something_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli.group, "main", fail)
    assert cli.main(["version"]) == 1
    assert "Broken pipe" in capsys.readouterr().err
