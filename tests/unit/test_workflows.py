"""The workflows: actions are pinned, tokens have few permissions, and no job that runs tests may write."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kustomize import DEPLOY, REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"^\s*(?:- )?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
WRITERS = {
    ("release", "image"): {"packages"},
    ("release", "publish"): {"packages", "id-token", "attestations"},
    ("release", "release"): {"contents", "id-token", "attestations"},
}
"""Jobs that may write, and what."""
OWN_CODE = re.compile(r"\bmake\b|\.ci/|pytest|\bpython|(?:^|\s)\./", re.MULTILINE)
"""Commands that run code of the repository."""

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


@each_workflow
def test_actions_are_pinned_to_commits_with_their_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if re.match(r"\s*(?:- )?uses:", line)]
    assert lines
    assert not [line for line in lines if not PINNED.match(line)]


def test_one_action_has_one_version() -> None:
    found = {use for path in WORKFLOWS for use in re.findall(r"uses: (\S+@\S+)", path.read_text())}
    names = [use.partition("@")[0] for use in found]
    assert sorted(names) == sorted(set(names))


@each_workflow
def test_a_token_has_no_more_permissions_than_its_job_needs(path: Path) -> None:
    default = yaml.safe_load(path.read_text())["permissions"]
    assert default in ({}, {"contents": "read"})
    for name, job in jobs(path).items():
        given = job.get("permissions", default)
        written = {what for what, access in given.items() if access == "write"}
        assert written == WRITERS.get((path.stem, name), set()), name
        assert set(given.values()) <= {"read", "write"}


@each_workflow
def test_a_job_that_may_write_runs_no_code_of_the_repository(path: Path) -> None:
    for name, job in jobs(path).items():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        if (path.stem, name) in WRITERS:
            assert not OWN_CODE.search(commands), name
        else:
            assert OWN_CODE.search(commands), name


@each_workflow
def test_a_checkout_leaves_no_token_for_later_steps(path: Path) -> None:
    for job in jobs(path).values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@each_workflow
def test_no_command_contains_an_expression(path: Path) -> None:
    """GitHub would insert the value as text, as code of the shell. Variables of the environment are safe."""
    for job in jobs(path).values():
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")]


@each_workflow
def test_every_make_target_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for job in jobs(path).values():
        for step in job["steps"]:
            assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= targets


def test_the_image_is_published_only_after_the_tests() -> None:
    found = jobs(REPOSITORY / ".github/workflows/release.yml")
    assert set(found["image"]["needs"]) == {"test", "build"}
    assert (found["publish"]["needs"], found["release"]["needs"]) == ("image", "publish")
    (build,) = [step for step in found["image"]["steps"] if "build-push" in step.get("uses", "")]
    assert build["with"]["sbom"] is True
    assert build["with"]["provenance"] == "mode=max"


def test_what_an_image_is_built_from_is_pinned() -> None:
    base, *_ = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", base)
    for name in ("requirements.txt", "build-requirements.txt"):
        text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
        assert re.fullmatch(r"(?:[\w.-]+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n)+", text)


def test_dependabot_renews_everything_that_is_pinned() -> None:
    found = yaml.safe_load((REPOSITORY / ".github/dependabot.yml").read_text())["updates"]
    covered = {(each["package-ecosystem"], each["directory"]) for each in found}
    assert covered == {("pip", "/"), ("pip", "/deploy"), ("docker", "/deploy"), ("github-actions", "/")}


@each_workflow
def test_shellcheck_accepts_every_command(path: Path) -> None:
    for job in jobs(path).values():
        for step in job["steps"]:
            if script := step.get("run"):
                # SC2016: a template of docker in single quotes. SC2046: a list of digests, which are words.
                command = [SHELLCHECK, "--shell=bash", "--exclude=SC2016,SC2046", "-"]
                done = subprocess.run(
                    command, input=f"set -e\n{script}", capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stdout
