"""Children in Python import nothing from the current folder, where anybody can have put a package."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documented import ROOT

_STARTS = {
    "child": "from ebpfproxy.linux.child import Child; Child('ebpfproxy.errors').end()",
    "compiler": "from ebpfproxy.linux.bpf import compiler; compiler._run('{}')",
    "program of the lab": "import subprocess; from ebpfproxy.lab import agent; "
    "subprocess.run([*agent.PROGRAM, '--help'], stdout=subprocess.DEVNULL)",
}


@pytest.mark.parametrize("start", _STARTS)
@pytest.mark.parametrize("planted", ["ebpfproxy", "json"])
def test_a_package_in_the_current_folder_does_not_run(start: str, planted: str, tmp_path: Path) -> None:
    (tmp_path / planted).mkdir()
    (tmp_path / planted / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = [sys.executable, "-P", "-c", _STARTS[start]]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    assert not (tmp_path / "ran").exists()


def test_a_checkout_that_is_not_installed_starts_children(tmp_path: Path) -> None:
    """`python -m ebpfproxy` in a checkout: its children import from there, too."""
    (tmp_path / "ebpfproxy").symlink_to(ROOT / "ebpfproxy")
    program = "import subprocess; from ebpfproxy.linux.child import python; "
    program += "subprocess.run(python('-c', 'import ebpfproxy; print(ebpfproxy.__file__)'), check=True)"
    (tmp_path / "start.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "start"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path))
