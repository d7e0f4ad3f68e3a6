"""Runs those examples of the help that create nodes of their own: of `run`, `demo` and `bench`.

tests/kernel/test_documented_commands.py runs the others.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ebpfproxy.lab import Lab, manifests
from tests.support.documented import ROOT, Command, in_help

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

SMALLEST = {
    "connect": "--services=2 --endpoints=1 --samples=20 --rounds=1",
    "nodeport": "--services=2 --endpoints=1 --samples=20 --rounds=1 --megabytes=2",
    "packet": "--services=2 --endpoints=1 --samples=60 --rounds=1 --runs=1000",
    "sync": "--services=10 --endpoints=2 --changes=3 --rounds=1 --sync-period=1",
    "churn": "--connects=200 --seconds=60",
    "compare": "--services=2 --cases=connect --modes=ebpf --rounds=1 --seconds=0.1",
}
"""By benchmark: options that make it short. They come last, and override those of the example."""


def examples(pattern: str) -> list[Command]:
    return [each for each in in_help() if re.match(pattern, each.text)]


def run(text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command in `folder`, where it may write files."""
    program = [sys.executable, "-m", "ebpfproxy", *shlex.split(text)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


BENCHES = "ebpfproxy bench (?!.*(?:--kube-proxy|--from)=)"
"""A kube-proxy and the file of an earlier run are not here: tests/unit/bench tests these options."""


@pytest.mark.long  # in make test, test_benches.py runs all benchmarks
@pytest.mark.parametrize("example", examples(BENCHES), ids=lambda each: f"{each.text}")
def test_an_example_of_a_benchmark_ends_with_results(example: Command, tmp_path: Path) -> None:
    name = example.text.split()[2]
    done = run(f"{example.text} {SMALLEST[name]}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("example", examples("ebpfproxy demo"), ids=lambda each: f"{each.text}")
def test_the_demo_runs_to_its_end(example: Command, tmp_path: Path) -> None:
    done = run(example.text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Removed everything." in done.stdout
    assert "[/]" not in done.stdout, "styles are not text"


@pytest.mark.parametrize("example", examples("ebpfproxy run .*--manifests="), ids=lambda each: f"{each.text}")
def test_the_agent_serves_a_folder_of_manifests(example: Command) -> None:
    flags = [word for word in example.text.split()[2:] if not word.startswith("--manifests=")]
    with Lab("help-examples") as lab:
        folder = lab.folder / "manifests"
        folder.mkdir()
        manifests.write(folder / "web.yaml", manifests.service("web", ["10.96.0.10"], [manifests.port(80)]))
        assert lab.agent(folder, *flags).await_sync().values["services"] == "1"
