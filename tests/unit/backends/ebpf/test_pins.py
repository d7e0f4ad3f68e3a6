"""Which folders of programs are there, which of them ever had programs attached, and which maps they use."""

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from ebpfproxy.backends.ebpf.pins import Pins, converted
from ebpfproxy.errors import Rejected


def make(root: Path, *folders: str) -> Pins:
    for name in folders:
        (root / name).mkdir(parents=True)
    return Pins(root)


def link(pins: Pins, folder: str, pin: str) -> None:
    """The programs of this folder use this map."""
    links = pins.root / folder / "maps"
    links.mkdir(parents=True, exist_ok=True)
    pins.maps.mkdir(exist_ok=True)
    (pins.maps / pin).touch()
    (links / pin.split("-")[0]).symlink_to(f"../../maps/{pin}")


def test_incomplete_program_folders_do_not_count_as_loaded(tmp_path: Path) -> None:
    pins = make(tmp_path, "programs-a", "programs-b_partial", "v2-c", "links", "maps")
    assert [path.name for path in pins.folders()] == ["programs-a", "programs-b_partial", "v2-c"]
    assert [path.name for path in pins.loaded()] == ["programs-a", "v2-c"]


def test_without_a_programs_folder_nothing_is_in_force(tmp_path: Path) -> None:
    pins = Pins(tmp_path / "missing")
    assert list(pins.loaded()) == []
    assert pins.in_force() is None
    assert pins.maps_of(None) == {}


def test_every_shape_of_a_map_is_found_and_no_other_map(tmp_path: Path) -> None:
    pins = make(tmp_path)
    link(pins, "programs-a", "flows-1-1")
    link(pins, "programs-b", "flows-1-2")
    link(pins, "programs-b", "previous_flows-1-1")
    found = [str(path.relative_to(tmp_path)) for path in pins.pinned_maps("flows")]
    assert found == ["maps/flows-1-1", "maps/flows-1-2"]


def test_maps_that_only_other_programs_use_are_removed_with_them(tmp_path: Path) -> None:
    pins = make(tmp_path, "v2-a/maps")
    for folder, pin in (("programs-a", "flows-1-1"), ("programs-b", "flows-1-2")):
        link(pins, folder, pin)
        link(pins, folder, f"node-1-{folder[-1]}")
    (tmp_path / "programs-a" / "maps" / "devices").symlink_to("../../maps/devices-1-1")
    link(pins, "programs-b", "devices-1-1")
    pins.remove_others(tmp_path / "programs-b")
    assert {path.name for path in pins.folders()} == {"programs-b"}
    assert {path.name for path in pins.maps.iterdir()} == {"flows-1-2", "node-1-b", "devices-1-1"}


def test_the_folder_in_force_is_linked_and_exists(tmp_path: Path) -> None:
    pins = make(tmp_path, "programs-a")
    pins.set_current(tmp_path / "programs-a")
    assert pins.in_force() == tmp_path / "programs-a"
    pins.set_current(tmp_path / "programs-b")
    assert pins.in_force() is None


def test_pins_that_cannot_be_read_at_the_moment_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by fault injection: without the previous version, its flows would not be migrated."""
    pins = make(tmp_path, "programs-a")
    pins.set_current(tmp_path / "programs-a")

    def fails(path: Path) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Path, "readlink", fails)
    with pytest.raises(Rejected, match="Cannot allocate memory"):
        pins.in_force()


def test_a_failed_file_operation_on_pins_is_an_error_that_names_the_pin(tmp_path: Path) -> None:
    """Found by fault injection: it ended the agent."""
    with (
        pytest.raises(Rejected, match="cannot access /bpf/links: Cannot allocate memory"),
        converted(tmp_path),
    ):
        raise OSError(errno.ENOMEM, "Cannot allocate memory", "/bpf/links")
