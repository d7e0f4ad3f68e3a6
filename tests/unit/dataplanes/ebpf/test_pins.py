"""Which layouts are there, and which of them ever had programs attached."""

from pathlib import Path

from ebpfproxy.dataplanes.ebpf.pins import Pins


def test_a_layout_whose_programs_were_never_finished_is_not_loaded(tmp_path: Path) -> None:
    for name in ("v2-a/programs_1", "v2-b/programs_1_partial", "v2-c/maps", "v3-d/programs_1_partial"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "v3-d/programs_2").mkdir()
    (tmp_path / "links").mkdir()
    pins = Pins(tmp_path)
    assert [layout.name for layout in pins.layouts()] == ["v2-a", "v2-b", "v2-c", "v3-d"]
    assert [layout.name for layout in pins.loaded()] == ["v2-a", "v3-d"]


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert list(Pins(tmp_path / "missing").loaded()) == []
