"""`dump --watch`: which changes it shows, and how."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.cli import dump_watch
from ebpfproxy.cli.dump_sections import SECTIONS
from ebpfproxy.cli.dump_watch import Change, Rows

_FLOW = {
    "service": "default/web:http",
    "protocol": "TCP",
    "client": "192.0.2.9:1001",
    "frontend": "10.96.0.1:80",
    "state": "SYN",
    "age": 1.0,
    "flags": [],
}


def test_every_section_has_a_key() -> None:
    assert dump_watch._KEYS.keys() == {*SECTIONS, "objects"}


def test_rows_that_come_go_and_change_are_changes() -> None:
    rows, other = Rows(), _FLOW | {"client": "192.0.2.9:1002"}
    assert rows.read({"conntrack": [_FLOW]}) == [Change("added", "conntrack", _FLOW, {})]
    assert rows.read({"conntrack": [_FLOW | {"age": 2.0}]}) == []
    established = _FLOW | {"state": "ESTABLISHED", "age": 0.0}
    assert rows.read({"conntrack": [established, other]}) == [
        Change("changed", "conntrack", established, {"state": "SYN"}),
        Change("added", "conntrack", other, {}),
    ]
    assert rows.read({"conntrack": [other]}) == [Change("removed", "conntrack", established, {})]


def test_the_node_port_of_the_other_family_is_another_row() -> None:
    """Both have the address "*"."""
    one, other = (
        {"address": "*", "port": 30001, "protocol": "TCP", "family": family, "internal": [endpoint]}
        for family, endpoint in (("IPv4", "10.1.0.1:80"), ("IPv6", "[fd01::1]:80"))
    )
    rows = Rows()
    assert len(rows.read({"services": [one, other]})) == 2
    assert rows.read({"services": [one, other]}) == []


_READING = st.dictionaries(st.integers(0, 5), st.integers(0, 3))


@given(readings=st.lists(_READING, min_size=1))
def test_the_changes_lead_from_each_reading_to_the_next(readings: list[dict[int, int]]) -> None:
    rows, state = Rows(), dict[int, int]()
    for reading in readings:
        for change in rows.read({"maps": [{"map": k, "entries": v} for k, v in reading.items()]}):
            key = change.row["map"]
            assert (change.change != "added") == (key in state)
            if change.change == "removed":
                del state[key]
            else:
                if change.change == "changed":
                    assert change.previous == {"entries": state[key]}
                state[key] = change.row["entries"]
        assert state == reading


def _follow(output: str, *readings: dict[str, Any]) -> None:
    """Follow these readings; the reading after the last one is an interrupt."""
    following = iter(readings)

    def read() -> dict[str, Any]:
        try:
            return next(following)
        except StopIteration:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        dump_watch.follow(read, 0, lambda reading: print("first:", len(list(reading["conntrack"]))), output)


def test_changes_are_lines_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    changed = _FLOW | {"state": "ESTABLISHED", "flags": ["node", "redirect"]}
    _follow("table", {"conntrack": [_FLOW]}, {"conntrack": [changed]}, {}, {"conntrack": []})
    first, change, removal = capsys.readouterr().out.splitlines()
    assert first == "first: 1"
    assert change[8:] == (
        " ~ conntrack service=default/web:http protocol=TCP client=192.0.2.9:1001 frontend=10.96.0.1:80"
        " state=SYN -> ESTABLISHED flags=none -> node,redirect"
    )
    assert removal[8:] == (
        " - conntrack service=default/web:http protocol=TCP client=192.0.2.9:1001 frontend=10.96.0.1:80"
        " state=ESTABLISHED flags=node,redirect"
    )


def test_changes_are_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    _follow("json", {"conntrack": [_FLOW]}, {"conntrack": [_FLOW | {"state": "FIN"}]}, {"conntrack": []})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["change"] for each in lines] == ["initial", "changed", "removed"]
    assert lines[0]["row"] == _FLOW
    assert (lines[1]["row"]["state"], lines[1]["previous"]) == ("FIN", {"state": "SYN"})
    assert all(each["section"] == "conntrack" and each["time"] for each in lines)
