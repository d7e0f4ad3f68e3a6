"""The list of `make mutations` is applicable to the code as it is."""

import pytest

from tests.mutations.__main__ import main
from tests.mutations.catalog import ROOT, Mutation, mutations

EVERY = mutations()
each = pytest.mark.parametrize("mutation", EVERY, ids=[mutation.id for mutation in EVERY])


@each
def test_the_text_occurs_once(mutation: Mutation) -> None:
    assert mutation.occurrences(ROOT) == 1, (
        "choose a text of the present code in tests/mutations/mutations.toml"
    )
    assert mutation.text != mutation.replacement


@each
def test_the_file_of_the_test_exists(mutation: Mutation) -> None:
    file, *options = mutation.test_arguments
    assert (ROOT / file.partition("::")[0]).is_file()
    assert options[::2] in ([], ["-k"])


@each
def test_it_says_what_it_breaks_in_one_sentence(mutation: Mutation) -> None:
    assert mutation.breaks.endswith(".")
    assert ". " not in mutation.breaks


def test_every_id_is_unique() -> None:
    assert len({mutation.id for mutation in EVERY}) == len(EVERY)


def test_each_part_of_the_project_has_mutations() -> None:
    parts = ("ebpfproxy/plan/", "ebpfproxy/backends/", "ebpfproxy/agent/", "ebpfproxy/api/", "bpf/")
    assert len(EVERY) >= 32
    assert all(any(mutation.file.startswith(part) for mutation in EVERY) for part in parts)


def test_the_list_has_a_row_for_each_mutation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {mutation.id}" for mutation in EVERY]
    assert {row.count(" | ") for row in rows} == {3}
