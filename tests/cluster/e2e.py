"""Runs e2e.test of the cluster's Kubernetes version, and reads its report."""

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from tests.cluster.programs import Problem, Programs
from tests.cluster.skips import skips
from tests.cluster.target import Target
from tests.cluster.versions import versions

NAMES = ("e2e.test", "ginkgo", "kubectl")
"""The programs of the conformance image."""
_FOCUS = r"\[sig-network\]"
_LEFT_OUT = "skipped"  # the message for a test that focus or skip exclude; a test's own reason follows " - "


class Outcome(msgspec.Struct, frozen=True):
    """The tests of one mode in one cluster. `failed`: their names. `skipped`: by their own decision."""

    kubernetes: str
    network: str
    machine: str
    mode: str
    passed: int
    failed: list[str]
    skipped: int


def version(programs: Programs, target: Target) -> str:
    """The version of Kubernetes, such as v1.37.0, without the suffix of a distribution."""
    found = json.loads(programs.output(*target.kubectl("version", "--output=json")))
    return str(found["serverVersion"]["gitVersion"]).partition("+")[0]


def extract(programs: Programs, engine: str, kubernetes: str, folder: Path) -> None:
    """Copy the programs of a Kubernetes version into `folder`. Raises Problem."""
    container = programs.output(engine, "create", f"{versions().conformance}:{kubernetes}").split()[-1]
    try:
        for name in NAMES:
            programs.run(engine, "cp", f"{container}:/usr/local/bin/{name}", folder / name)
    finally:
        programs.status(engine, "rm", container)


def command(target: Target, mode: str, tools: Path, report: Path, workers: int) -> Sequence[str]:
    """`workers`: number of tests that run at the same time."""
    return [
        str(tools / "ginkgo"),
        f"--procs={workers}",
        "--timeout=4h",
        "--no-color",
        f"--focus={_FOCUS}",
        f"--skip={'|'.join(skips(mode, target.families))}",
        str(tools / "e2e.test"),
        "--",
        f"--kubeconfig={target.kubeconfig}",
        f"--kubectl-path={tools / 'kubectl'}",
        "--provider=skeleton",
        "--disable-log-dump=true",
        f"--report-dir={report}",
    ]


def outcome(report: Path, kubernetes: str, network: str, machine: str, mode: str) -> Outcome:
    """What the JUnit files of a run say. A failure outside of tests counts as one. Raises Problem."""
    passed, skipped = 0, 0
    failed: list[str] = []
    for file in sorted(report.glob("junit*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            name, left_out = case.get("name", ""), case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif left_out is not None:
                skipped += left_out.get("message", "").startswith(f"{_LEFT_OUT} - ")
            else:
                passed += "[sig-network]" in name
    if not passed and not failed:
        raise Problem(f"cannot read the results of mode {mode}: no test ran; hint: see {report}")
    return Outcome(kubernetes, network, machine, mode, passed, failed, skipped)
