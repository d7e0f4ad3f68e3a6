"""Saved dumps: what is written is read back, and a file that is no saved dump is one clear error."""

import json
import typing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.backends.ebpf.inspect.saved import FORMAT, Header, SavedView, new_header
from ebpfproxy.backends.ebpf.inspect.view import DumpView
from ebpfproxy.cli.dump import command
from ebpfproxy.cli.dump_sections import SECTIONS
from ebpfproxy.cli.rows import WRITERS
from ebpfproxy.errors import ConfigError
from tests.support.examples import examples

_ROW_TYPES = {
    name: typing.get_args(typing.get_type_hints(getattr(SavedView, name))["return"])[0] for name in SECTIONS
}
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXTS,
    int: st.integers(0, 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    list[str]: st.lists(_TEXTS, max_size=6),
    list[int]: st.lists(st.integers(0, 2**64 - 1), max_size=6),
}


def _rows_of(row_type: Any) -> st.SearchStrategy[Any]:
    return st.builds(
        row_type._make, st.tuples(*(_VALUES[t] for t in typing.get_type_hints(row_type).values()))
    )


_CONTENTS = st.fixed_dictionaries({name: st.lists(_rows_of(each)) for name, each in _ROW_TYPES.items()})


def _save(path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, list[Any]]) -> Path:
    """Write as `dump all -o json` does."""
    sections = ((name, (row._asdict() for row in rows)) for name, rows in content.items())
    capsys.readouterr()
    WRITERS["json"](sections, True, new_header("n1", "ebpf")._asdict())
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(content=_CONTENTS)
def test_a_saved_dump_has_the_rows_that_were_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, list[Any]]
) -> None:
    view: DumpView = SavedView(_save(tmp_path / "dump.json", capsys, content))
    assert {name: list(SECTIONS[name].rows(view)) for name in SECTIONS} == content


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A saved dump with one frontend."""
    service = _ROW_TYPES["services"](
        *("default/web:http", "ClusterIP", "TCP", "10.96.0.1", 80),
        *(["10.244.1.3:8080"], ["10.244.1.3:8080"], "Cluster", 0, [], 1, "0+1", "0+1"),
    )
    content: dict[str, list[Any]] = {**{name: [] for name in SECTIONS}, "services": [service]}
    return _save(tmp_path / "dump.json", capsys, content)


def _dump(*arguments: str) -> str:
    return CliRunner().invoke(command, arguments, catch_exceptions=False).stdout


def test_a_saved_dump_is_shown_as_the_maps_are(saved: Path) -> None:
    assert "10.244.1.3:8080" in _dump(f"--from-dump={saved}")
    assert _dump("services", "--from-dump", str(saved), "--address=10.96.0.2") == "services: none\n"


def test_the_dump_of_a_saved_dump_is_the_same(saved: Path) -> None:
    assert _dump("all", "-o", "json", f"--from-dump={saved}") == saved.read_text()


def test_a_filtered_dump_names_its_filters_and_lacks_sections(saved: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    part.write_text(_dump("all", "-o", "json", f"--from-dump={saved}", "--address=[fd00::1]:80"))
    view = SavedView(part)
    assert (view.header.filters, view.services()) == (["--address=[fd00::1]:80"], [])
    with pytest.raises(ConfigError, match="has no section counters"):
        view.counters()


def _change(path: Path, **members: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def test_unknown_members_are_ignored(saved: Path) -> None:
    content = json.loads(saved.read_text())
    rows = [row | {"later": 1} for row in content["services"]]
    header = content["header"] | {"later": 1}
    _change(saved, services=rows, header=header, later=[])
    view = SavedView(saved)
    assert (view.header.node, len(view.services())) == ("n1", 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is empty"),
        ("[]", "not a JSON object"),
        ("SERVICE   KIND", "not a JSON object"),
        ("{}", "it has no header"),
        ('{"header": {"format": 1}}', "missing required field"),
        ('{"header": []}', "Expected `object`"),
        (json.dumps({"header": Header(FORMAT + 1, "9.0", "", "", "", "", [])._asdict()}), "its format is 2"),
        ('{"header": {"format": 2, "other": 1}}', "its format is 2"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_saved_dump_is_an_error_with_a_remedy(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "other"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        SavedView(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_every_truncation_of_a_saved_dump_is_an_error(saved: Path) -> None:
    content = saved.read_bytes().rstrip()
    for length in range(len(content)):
        saved.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"it is (truncated|empty)"):
            SavedView(saved)


def test_a_section_with_other_rows_is_an_error(saved: Path) -> None:
    _change(saved, services=[{"service": 1}])
    with pytest.raises(ConfigError, match="cannot read the section services"):
        SavedView(saved).services()
