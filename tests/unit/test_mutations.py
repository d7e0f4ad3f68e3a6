"""The tool that chooses mutations: `make mutations`."""

from pathlib import Path

import pytest

from tests.mutations import sampling
from tests.mutations.__main__ import main
from tests.mutations.operators import Place, edits_of_text
from tests.mutations.sampling import Entry, Skip

PYTHON = '''\
class Ü:
    """Has 1 docstring."""

    def first(self, a: int = 1) -> bool:
        log.info("a", count=1 + a)
        self.call("é", 1)
        if a and not (self.b):
            raise ValueError(a == 1)
        return a < 2 <= 3

    def __str__(self) -> str:
        return str(self.a)
'''
C = """\
/* if (a == 1) */
#define ONE (a == 1)
static __always_inline bool first(const struct packet *packet, u32 a)
{
	u32 b = a + 1; /* a < 2 */

	if (a)
		count(A);
	b -= 2;
	return !packet->at && b < 0x10;
}
"""


def mutants(file: str, text: str) -> set[tuple[str, str]]:
    """What changes: the lines before and after, without indentation."""
    found = [edit.lines(text) for edit in edits_of_text(file, text).values()]
    return {(before.strip(), after.strip()) for before, after in found}


def test_each_operator_of_python_changes_one_place() -> None:
    assert mutants("a.py", PYTHON) == {
        ('self.call("é", 1)', 'self.call("é", 2)'),
        ('self.call("é", 1)', "pass"),
        ("if a and not (self.b):", "if a or not (self.b):"),
        ("if a and not (self.b):", "if a and (self.b):"),
        ("return a < 2 <= 3", "return a <= 2 <= 3"),
        ("return a < 2 <= 3", "return a < 2 < 3"),
        ("return a < 2 <= 3", "return a < 3 <= 3"),
        ("return a < 2 <= 3", "return a < 2 <= 4"),
    }


def test_each_operator_of_c_changes_one_place() -> None:
    assert mutants("a.h", C) == {
        ("u32 b = a + 1; /* a < 2 */", "u32 b = a - 1; /* a < 2 */"),
        ("u32 b = a + 1; /* a < 2 */", "u32 b = a + 2; /* a < 2 */"),
        ("if (a)", "if (!(a))"),
        ("count(A);", ";"),
        ("b -= 2;", "b += 2;"),
        ("b -= 2;", "b -= 3;"),
        ("b -= 2;", ";"),
        ("return !packet->at && b < 0x10;", "return packet->at && b < 0x10;"),
        ("return !packet->at && b < 0x10;", "return !packet->at || b < 0x10;"),
        ("return !packet->at && b < 0x10;", "return !packet->at && b <= 0x10;"),
        ("return !packet->at && b < 0x10;", "return !packet->at && b < 17;"),
        ("return !packet->at && b < 0x10;", "return !(!packet->at && b < 0x10);"),
    }


def test_the_result_of_a_function_is_replaced_by_an_empty_one() -> None:
    text = "def a() -> list[int]:\n    return [b]\n\ndef c() -> int | None:\n    return d\n"
    assert mutants("a.py", text) == {("return [b]", "return []"), ("return d", "return None")}


def test_a_place_does_not_depend_on_other_functions() -> None:
    place = Place("a.py", "Ü.first", "comparison", 2)
    assert edits_of_text("a.py", PYTHON)[place].replacement == "<"
    more = PYTHON.replace("class Ü", "def zero(a):\n    return a == 1\n\nclass Ü")
    assert edits_of_text("a.py", more)[place].replacement == "<"


def test_the_choice_depends_only_on_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "STRATA", [sampling.Stratum("plan", 3, ["*.py"])])
    for name in "abcdef":
        (tmp_path / f"{name}.py").write_text(PYTHON)

    def choose(seed: int, *skipped: Skip, kept: list[Entry] | None = None) -> list[Entry]:
        return sampling.choose(tmp_path, seed, skipped, lambda place, edit: True, kept or [])

    first = choose(1)
    assert [entry.id for entry in first] == ["plan-01", "plan-02", "plan-03"]
    assert len({entry.place.file for entry in first}) == 3  # each file has one function
    assert choose(1) == first != choose(2)
    skipped = Skip("no test", first[0].place.file, "Ü.first")
    assert [entry.place for entry in choose(1, skipped)][:2] == [entry.place for entry in first[1:]]
    (tmp_path / first[1].place.file).unlink()
    again = choose(2, kept=first)
    assert [entry.id for entry in again] == ["plan-01", "plan-02", "plan-03"]
    assert [again[0], again[2]] == [first[0], first[2]]
    assert again[1].place.file not in {entry.place.file for entry in first}


def test_an_entry_whose_place_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampling, "SAMPLED", tmp_path / "sampled.toml")
    here = Entry("plan-01", Place("tests/mutations/edit.py", "Edit.lines", "constant", 1))
    sampling.write(1, [], [here, Entry("bpf-01", Place("bpf/gone.h", "gone", "not", 1))])
    assert main(["--list"]) == 1
    output = capsys.readouterr().out
    assert output.startswith(
        "bpf-01: gone: bpf/gone.h gone not 1\nplan-01 tests/mutations/edit.py Edit.lines"
    )


def test_every_place_of_the_list_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0, capsys.readouterr().out
    assert len(sampling.entries()) == sum(stratum.number for stratum in sampling.STRATA) == 60
