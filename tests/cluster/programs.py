"""Runs the programs that a cluster needs, and says how to install one that is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.cluster.versions import versions

ENGINES = ("docker", "podman")
_REMEDIES: Mapping[str, str] = {
    "kind": f"go install sigs.k8s.io/kind@{versions().kind}, or set KUBECONFIG to use an existing cluster",
    "kubectl": "make setup",
    "helm": "install Helm 3 or 4, see https://helm.sh/docs/intro/install/",
}


class Problem(Exception):
    """Why no tests can run, in one line with the remedy."""


class Programs:
    """`environment`: variables of all programs."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        own = Path(sys.executable).parent  # with kubectl, which `make setup` installs
        self._environment = {**environment, "PATH": f"{environment.get('PATH', os.defpath)}:{own}"}

    def need(self, *names: str) -> None:
        """Raises Problem for the first program that is not in PATH."""
        for name in names:
            if not self._has(name):
                raise Problem(f"cannot run {name}: it is not in PATH; hint: {_REMEDIES[name]}")

    def engine(self) -> str:
        """The container engine that runs here, which kind then uses, too. Raises Problem."""
        found = [name for name in ENGINES if self._has(name)]
        for name in found:
            if subprocess.run([name, "info"], env=self._environment, capture_output=True).returncode == 0:
                self._environment["KIND_EXPERIMENTAL_PROVIDER"] = name
                return name
        state = f"{' and '.join(found)} found, but not running" if found else "neither is in PATH"
        raise Problem(f"cannot use Docker or Podman: {state}; hint: apt-get install podman, or start Docker")

    def run(self, *command: str | Path, stdin: str = "") -> None:
        """The program's output goes to standard error. Raises Problem if it fails."""
        self._done(command, stdin, sys.stderr)

    def output(self, *command: str | Path) -> str:
        """What the program prints. Raises Problem if it fails."""
        return self._done(command, "", subprocess.PIPE).stdout

    def status(self, *command: str | Path) -> int:
        """The exit code of a program that may fail. Its output goes to standard error."""
        return subprocess.run([*map(str, command)], env=self._environment, stdout=sys.stderr).returncode

    def _has(self, name: str) -> bool:
        return shutil.which(name, path=self._environment["PATH"]) is not None

    def _done(
        self, command: Sequence[str | Path], stdin: str, stdout: IO[str] | int
    ) -> subprocess.CompletedProcess[str]:
        words = [*map(str, command)]
        print("+", *words, file=sys.stderr, flush=True)
        done = subprocess.run(words, env=self._environment, input=stdin, stdout=stdout, text=True)
        if done.returncode:
            raise Problem(f"cannot continue: `{' '.join(words[:4])}` ended with exit code {done.returncode}")
        return done
