"""Every command of the documents and of the help is run, checked or exempt; what is run: tests/kernel."""

import re

import pytest

from ebpfproxy.cli import group
from tests.support.documented import Command, commands, commands_below, in_help, in_page
from tests.support.documented_checks import EXEMPT, outcome_of

DIFFERENT = [*{each.text: each for each in reversed(commands())}.values()][::-1]


@pytest.mark.parametrize("command", DIFFERENT, ids=lambda each: f"{each.place} {each.text}"[:90])
def test_a_command_is_covered(command: Command) -> None:
    assert outcome_of(command)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("`ebpfproxy run --no-such-flag`", "README.md:1: .*no-such-flag"),
        ("```sh\nebpfproxy bench nothing\n```", "README.md:2: .*nothing"),
        ("`ebpfproxy run --iptables-backend=nothing`", "README.md:1: .*nothing"),
        ("```sh\n# why\nfrobnicate --all\n```", "README.md:3: no test covers `frobnicate --all`; add"),
        ("```console\n# make coffee\nno coffee\n```", "README.md:2: .*no target coffee"),
        ("```\nmake coffee\n```", "README.md:2: .*no target coffee"),
        (
            '```sh\nmake test-cluster CLUSTER="--cni=none"\n```',
            "README.md:2: .*not accept CLUSTER=--cni=none",
        ),
        ("`kubectl rollout status --no-such-flag`", "README.md:1: .*no-such-flag"),
        ("`kubectl exec POD -- ebpfproxy dump --no-such-flag`", "README.md:1: .*no-such-flag"),
        ("`kubectl ebpfproxy dump worker-1 --no-such-flag`", "README.md:1: .*no-such-flag"),
        ("`kubectl ebpfproxy frobnicate worker-1`", "README.md:1: .*no such command: frobnicate"),
        ("```sh\nkubectl apply -k deploy/elsewhere\n```", "README.md:2: there is no deploy/elsewhere"),
    ],
)
def test_a_command_that_is_wrong_or_unknown_is_named(text: str, failure: str) -> None:
    (command,) = in_page("README.md", text)
    with pytest.raises(AssertionError, match=failure):
        outcome_of(command)


def test_the_help_of_every_command_has_examples() -> None:
    pages = {each.page for each in in_help()}
    names = [name for name, _ in commands_below("ebpfproxy", group)]
    assert not [name for name in names if name != "ebpfproxy" and f"{name} --help" not in pages]


def test_an_example_is_of_the_command_whose_help_shows_it() -> None:
    for example in in_help():
        assert f"{example.text} ".startswith(f"{example.page.removesuffix(' --help')} "), example


def test_every_exemption_is_used() -> None:
    unused = [
        pattern for pattern in EXEMPT if not any(re.fullmatch(pattern, each.text) for each in DIFFERENT)
    ]
    assert not unused
