"""Creates a cluster, tests each mode in it, and prints the table of outcomes.

Exit code 1: a test failed; 2: a mode was not tested.
"""

import argparse
import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

from tests.cluster import e2e
from tests.cluster.created import created, install_network
from tests.cluster.e2e import Outcome
from tests.cluster.existing import existing
from tests.cluster.programs import Problem, Programs
from tests.cluster.proxy import MODES, install
from tests.cluster.table import written
from tests.cluster.target import Target
from tests.cluster.versions import versions


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line. `words`: None for that of this process. Raises SystemExit."""
    newest = [*versions().node_images][-1]
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description="run upstream's sig-network tests in a cluster of kind, or in that of KUBECONFIG",
    )
    parser.add_argument("--modes", default=",".join(MODES), help="one after the other; default: %(default)s")
    parser.add_argument("--workers", type=int, default=8, help="tests at the same time; default: %(default)s")
    parser.add_argument(
        "--results", type=Path, default=Path("build/cluster"), help="folder; default: %(default)s"
    )
    kind = parser.add_argument_group("without KUBECONFIG")
    kind.add_argument("--cni", default="kindnet", choices=versions().networks, help="default: %(default)s")
    kind.add_argument(
        "--kubernetes", default=newest, choices=versions().node_images, help="default: %(default)s"
    )
    other = parser.add_argument_group("with KUBECONFIG")
    other.add_argument("--image", default="", help="with a tag, from a registry that the nodes reach")
    other.add_argument("--values", type=Path, help="file with further values of the chart")
    given = parser.parse_args(words)
    given.results = given.results.resolve()  # ginkgo starts the tests in another folder
    given.modes = given.modes.split(",")
    if unknown := [mode for mode in given.modes if mode not in MODES]:
        parser.error(f"unknown mode: {unknown[0]}")
    return given


@contextlib.contextmanager
def _cluster(programs: Programs, engine: str, given: argparse.Namespace, scratch: Path) -> Iterator[Target]:
    """The cluster with ebpfproxy in the first mode. Raises Problem."""
    if kubeconfig := os.environ.get("KUBECONFIG"):
        values = yaml.safe_load(given.values.read_text()) if given.values else {}
        with existing(programs, Path(kubeconfig).resolve(), given.image, values) as target:
            install(programs, target, given.modes[0])
            yield target
    else:
        logs = given.results / "logs"
        with created(programs, engine, given.kubernetes, given.cni, scratch, logs) as target:
            install(programs, target, given.modes[0])
            install_network(programs, engine, target)
            target.await_nodes(programs)
            yield target


def _tested(programs: Programs, engine: str, given: argparse.Namespace, scratch: Path) -> Iterator[Outcome]:
    with _cluster(programs, engine, given, scratch) as target:
        kubernetes = e2e.version(programs, target)
        e2e.extract(programs, engine, kubernetes, scratch)
        for number, mode in enumerate(given.modes):
            if number:
                install(programs, target, mode)
            report = given.results / mode
            shutil.rmtree(report, ignore_errors=True)
            report.mkdir()
            programs.status(*e2e.command(target, mode, scratch, report, given.workers))
            yield e2e.outcome(report, kubernetes, target.network, platform.machine(), mode)


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that the cluster is removed
    given.results.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    programs = Programs()
    try:
        programs.need(*(["kubectl", "helm"] if os.environ.get("KUBECONFIG") else ["kind", "kubectl", "helm"]))
        with tempfile.TemporaryDirectory(prefix="ebpfproxy-e2e-") as scratch:
            for outcome in _tested(programs, programs.engine(), given, Path(scratch)):
                outcomes.append(outcome)
                (given.results / "results.json").write_bytes(msgspec.json.encode(outcomes))
    except Problem as problem:
        print(problem, file=sys.stderr)
    if outcomes:
        print(written(outcomes))
    if len(outcomes) < len(given.modes):
        return 2
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
