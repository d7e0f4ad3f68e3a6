"""A folder of manifests: what is read, what a change in it puts, and what survives broken files."""

import logging
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ebpfproxy.api import manifest_folder
from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NAMESPACE,
    NODE,
    PEER_NODE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    Event,
    Invalid,
    NodeChanged,
    PeerChanged,
    ServiceChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.api.manifest_folder import KEEPING, FileSource, Reading, changes, read_directory
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.node import PeerNode
from tests.support.build import name, node, service, service_object, slice_object

WEB, API = name("web"), name("api")


def manifest(called: str = "web", ip: str = "10.96.0.10") -> str:
    return (
        f"kind: Service\napiVersion: v1\nmetadata: {{name: {called}}}\n"
        f"spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"
    )


def changed(called: str = "web", ip: str = "10.96.0.10") -> ServiceChanged:
    return ServiceChanged(name(called), service(called, ips=[ip]))


NODE_MANIFEST = (
    "kind: Node\nmetadata: {name: here}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.10}]}\n"
)


def settle(path: Path) -> None:
    """Set the times of a file into the past."""
    written = path.stat().st_mtime_ns - manifest_folder._WRITTEN_NS
    os.utime(path, ns=(written, written))


def step(folder: Path, before: Reading) -> tuple[Reading, list[Event]]:
    after = read_directory(folder, "here", before)
    return after, changes(before, after)


# --- Readings ---


def test_all_manifests_of_the_folder_itself_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text(manifest("b"))
    (tmp_path / "a.yaml").write_text(manifest("a") + "---\n" + NODE_MANIFEST)
    (tmp_path / "c.json").write_bytes(msgspec.json.encode(slice_object("web")))
    (tmp_path / ".hidden.yaml").write_text(manifest("hidden"))
    (tmp_path / "notes.txt").write_text("junk: [")
    (tmp_path / "sub.yaml").mkdir()
    (tmp_path / "sub.yaml" / "d.yaml").write_text(manifest("deep"))
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.yaml")
    reading, events = step(tmp_path, Reading())
    assert list(reading.files) == ["a.yaml", "b.yml", "c.json"]
    assert events[0] == changed("a")
    assert events[1] == NodeChanged(node())
    assert events[2] == PeerChanged("here", PeerNode(node().addresses))
    assert events[3] == changed("b")
    assert isinstance(events[4], SliceChanged)
    assert len(events) == 5


def test_only_changed_objects_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("web") + "---\n" + manifest("api"))
    reading, _ = step(tmp_path, Reading())
    assert step(tmp_path, reading)[1] == []
    (tmp_path / "a.yaml").write_text(
        "# moved down\n---\n" + manifest("api") + "---\n" + manifest("web", "10.96.0.11")
    )
    reading, events = step(tmp_path, reading)
    assert events == [changed("web", "10.96.0.11")]


def test_an_object_that_is_in_no_file_any_more_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("---\n".join([manifest("web"), NODE_MANIFEST]))
    (tmp_path / "b.json").write_bytes(msgspec.json.encode(slice_object("web")))
    reading, _ = step(tmp_path, Reading())
    (tmp_path / "c.yaml").write_text(manifest("web"))
    (tmp_path / "a.yaml").unlink()
    (tmp_path / "b.json").unlink()
    reading, events = step(tmp_path, reading)
    assert sorted(events, key=repr) == [
        NodeChanged(None),
        PeerChanged("here", None),
        SliceChanged(name("web-1"), None),
    ]
    write(tmp_path / "c.yaml", "")
    assert step(tmp_path, reading)[1] == [ServiceChanged(WEB, None)]


def test_of_an_object_in_two_files_the_first_wins_and_the_rejection_names_both(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("---\n" + manifest("web", "10.96.0.2"))
    reading, events = step(tmp_path, Reading())
    assert events == [changed("web", "10.96.0.2")]
    (tmp_path / "a.yaml").write_text(manifest("web", "10.96.0.1"))
    reading, events = step(tmp_path, reading)
    complaint = Invalid(SERVICE, "default/web", "b.yaml:2: ignored, because a.yaml:1 defines the same object")
    assert events == [complaint, changed("web", "10.96.0.1")]
    assert step(tmp_path, reading)[1] == []
    (tmp_path / "a.yaml").unlink()
    assert step(tmp_path, reading)[1] == [changed("web", "10.96.0.2")]


def test_of_an_object_defined_twice_in_a_file_the_first_wins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("web", "10.96.0.1") + "---\n" + manifest("web", "10.96.0.2"))
    complaint = Invalid(SERVICE, "default/web", "a.yaml:6: ignored, because a.yaml:1 defines the same object")
    assert step(tmp_path, Reading())[1] == [complaint, changed("web", "10.96.0.1")]


def test_the_last_good_state_of_a_file_that_does_not_parse_stays(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("web"))
    (tmp_path / "b.yaml").write_text(manifest("api"))
    reading, _ = step(tmp_path, Reading())
    (tmp_path / "a.yaml").write_text(manifest("web", "10.96.0.99") + "---\nhalf: [wr")
    (tmp_path / "b.yaml").unlink()
    reading, events = step(tmp_path, reading)
    first, second = events
    assert isinstance(first, Invalid)
    assert (first.kind, first.name) == (manifest_folder.FILE, "a.yaml")
    assert first.reason.startswith("a.yaml:6: ")
    assert second == ServiceChanged(API, None)
    assert step(tmp_path, reading)[1] == []
    write(tmp_path / "a.yaml", manifest("web", "10.96.0.99"))
    assert step(tmp_path, reading)[1] == [changed("web", "10.96.0.99")]


def test_the_last_good_value_of_an_invalid_object_stays(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("web") + "---\n" + manifest("api"))
    reading, _ = step(tmp_path, Reading())
    write(tmp_path / "a.yaml", manifest("web", "junk") + "---\n" + manifest("api", "10.96.0.20"))
    reading, events = step(tmp_path, reading)
    assert [type(event) for event in events] == [Invalid, ServiceChanged]
    assert events[1] == changed("api", "10.96.0.20")
    write(tmp_path / "a.yaml", manifest("api", "10.96.0.20"))
    assert step(tmp_path, reading)[1] == [ServiceChanged(WEB, None)]


def test_a_file_that_never_parsed_has_no_objects(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"kind": "Service",\n')
    reading, (event,) = step(tmp_path, Reading())
    assert isinstance(event, Invalid)
    assert event.reason.startswith("a.json:2: ")
    assert reading.objects == {}


def test_a_config_map_volume_that_the_kubelet_swaps_is_read_atomically(tmp_path: Path) -> None:
    """The kubelet writes a ConfigMap's files behind ..data, and renames that link."""
    for version, ip in (("..1", "10.96.0.1"), ("..2", "10.96.0.2")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(manifest("web", ip))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    reading, events = step(tmp_path, Reading())
    assert events == [changed("web", "10.96.0.1")]
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    assert step(tmp_path, reading)[1] == [changed("web", "10.96.0.2")]


# --- Files that are written in place ---


@pytest.mark.parametrize(
    "cut",
    ["", manifest("api"), manifest("api") + "---\n" + manifest("web")[:-20], manifest("api", "10.96.0.11")],
    ids=["emptied", "cut between objects", "cut within an object", "changed and cut"],
)
def test_a_file_that_is_being_written_keeps_its_previous_state(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(manifest("api") + "---\n" + manifest("web"))
    settle(path)
    before, _ = step(tmp_path, Reading())
    path.write_text(cut)
    reading, events = step(tmp_path, before)
    assert events == []
    assert reading.incomplete
    assert reading.objects == before.objects
    path.write_text(manifest("api") + "---\n" + manifest("web", "10.96.0.11"))
    reading, events = step(tmp_path, reading)
    assert events == [changed("web", "10.96.0.11")]
    assert not reading.incomplete


def test_a_file_that_is_rewritten_with_its_previous_content_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(manifest("api"))
    reading, _ = step(tmp_path, Reading())
    path.write_text("")
    reading, _ = step(tmp_path, reading)
    path.write_text(manifest("api"))
    reading, events = step(tmp_path, reading)
    assert (events, reading.incomplete) == ([], False)


def test_a_truncated_file_that_was_written_long_ago_takes_effect(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(manifest("api") + "---\n" + manifest("web"))
    reading, _ = step(tmp_path, Reading())
    path.write_text(manifest("api"))
    reading, _ = step(tmp_path, reading)
    settle(path)
    reading, events = step(tmp_path, reading)
    assert events == [ServiceChanged(WEB, None)]
    assert not reading.incomplete


def test_a_file_that_is_emptied_while_it_is_read_keeps_its_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(manifest("api"))
    reading, _ = step(tmp_path, Reading())
    path.write_text(manifest("api", "10.96.0.11"))
    settle(path)
    real = Path.read_bytes

    def empty(opened: Path) -> bytes:
        opened.write_text("")
        return real(opened)

    monkeypatch.setattr(Path, "read_bytes", empty)
    reading, events = step(tmp_path, reading)
    assert (events, reading.incomplete) == ([], True)


def test_a_file_that_is_replaced_by_rename_takes_effect_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", manifest("api") + "---\n" + manifest("web"))
    reading, _ = step(tmp_path, Reading())
    write(tmp_path / "a.yaml", manifest("api"))
    reading, events = step(tmp_path, reading)
    assert events == [ServiceChanged(WEB, None)]
    assert not reading.incomplete


# --- Following a folder ---


class Followed:
    """A FileSource in a thread, and the events that it puts."""

    def __init__(self, folder: Path) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.stop = threading.Event()
        source = FileSource(folder, "here", self.events.put)
        self.thread = threading.Thread(target=source.run, args=(self.stop,))
        self.thread.start()

    def next(self) -> Event:
        return self.events.get(timeout=20)

    def until_synced(self) -> list[Event]:
        found: list[Event] = []
        while Synced(SERVICE_CIDR) not in found:
            found.append(self.next())
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "manifests"
    made.mkdir()
    return made


@pytest.fixture
def followed(folder: Path) -> Iterator[Followed]:
    (folder / "a.yaml").write_text(manifest("web"))
    running = Followed(folder)
    yield running
    running.stop.set()
    running.thread.join(20)
    assert not running.thread.is_alive()
    assert running.events.empty(), "an event that no test asked for"


def write(path: Path, content: str) -> None:
    """Replace a file as editors do: write a new file and rename it over the old one."""
    path.with_name(f".{path.name}.tmp").write_text(content)
    path.with_name(f".{path.name}.tmp").replace(path)


def test_all_objects_are_reported_before_synced_of_each_kind(followed: Followed) -> None:
    synced = [
        Synced(kind) for kind in (SERVICE, ENDPOINT_SLICE, NODE, PEER_NODE, POD, NAMESPACE, SERVICE_CIDR)
    ]
    assert followed.until_synced() == [changed("web"), *synced]


def test_changes_of_files_are_reported(followed: Followed, folder: Path) -> None:
    followed.until_synced()
    write(folder / "b.yaml", manifest("api"))
    assert followed.next() == changed("api")
    write(folder / "a.yaml", manifest("web", "10.96.0.11"))
    assert followed.next() == changed("web", "10.96.0.11")
    (folder / "b.yaml").rename(folder / "c.yml")
    (folder / "a.yaml").unlink()
    assert followed.next() == ServiceChanged(WEB, None)
    write(folder / "c.yml", "")
    assert followed.next() == ServiceChanged(API, None)


def test_an_object_that_is_removed_from_a_file_in_place_is_deleted(followed: Followed, folder: Path) -> None:
    followed.until_synced()
    path = folder / "a.yaml"
    path.write_text(manifest("web") + "---\n" + manifest("api"))
    assert followed.next() == changed("api")
    for rest, gone in ((manifest("api"), WEB), ("", API)):
        path.write_text(rest)
        assert followed.next() == ServiceChanged(gone, None)


def test_a_file_that_is_rewritten_in_two_steps_loses_no_object(
    followed: Followed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_folder, "_WRITTEN_NS", 60_000_000_000)  # however slow this machine is
    followed.until_synced()
    for ip in ("10.96.0.11", "10.96.0.12", "10.96.0.13"):
        with (folder / "a.yaml").open("w") as file:
            told = threading.Event()
            assert not told.wait(0.06)  # several times the debounce
            file.write(manifest("web", ip))
        assert followed.next() == changed("web", ip)


def test_a_broken_file_is_reported_and_the_next_valid_write_counts(followed: Followed, folder: Path) -> None:
    followed.until_synced()
    write(folder / "a.yaml", manifest("web", "10.96.0.11") + "---\n[")
    event = followed.next()
    assert isinstance(event, Invalid)
    assert event.name == "a.yaml"
    write(folder / "a.yaml", manifest("web", "10.96.0.11"))
    assert followed.next() == changed("web", "10.96.0.11")


def test_a_config_map_volume_that_the_kubelet_swaps_is_reported(tmp_path: Path) -> None:
    for version, ip in (("..1", "10.96.0.1"), ("..2", "10.96.0.2")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(manifest("web", ip))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    followed = Followed(tmp_path)
    try:
        assert changed("web", "10.96.0.1") in followed.until_synced()
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        assert followed.next() == changed("web", "10.96.0.2")
    finally:
        followed.stop.set()
        followed.thread.join(20)


def test_a_change_behind_a_link_out_of_the_folder_is_found(followed: Followed, folder: Path) -> None:
    followed.until_synced()
    outside = folder.parent / "outside.yaml"
    outside.write_text(manifest("api", "10.96.0.1"))
    (folder / "b.yaml").symlink_to(outside)
    assert followed.next() == changed("api", "10.96.0.1")
    outside.write_text(manifest("api", "10.96.0.123"))
    assert followed.next() == changed("api", "10.96.0.123")


def test_the_last_state_of_a_folder_that_is_deleted_stays_until_it_is_back(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_folder, "_POLL_MS", 50)
    (folder / "a.yaml").write_text(manifest("web"))
    followed = Followed(folder)
    try:
        followed.until_synced()
        with caplog.at_level(logging.WARNING):
            folder.rename(folder.with_name("gone"))
            shutil.rmtree(folder.with_name("gone"))
            looked = threading.Event()
            while not caplog.records:
                assert not looked.wait(0.01)
            assert followed.events.empty()
            fresh = folder.with_name("fresh")
            fresh.mkdir()
            (fresh / "a.yaml").write_text(manifest("web", "10.96.0.11"))
            (fresh / "b.yaml").write_text(manifest("api"))
            fresh.rename(folder)
            assert [followed.next(), followed.next()] == [changed("web", "10.96.0.11"), changed("api")]
        assert [record.getMessage() for record in caplog.records] == [KEEPING]
        write(folder / "a.yaml", "")
        assert followed.next() == ServiceChanged(WEB, None)
    finally:
        followed.stop.set()
        followed.thread.join(20)


def test_a_path_that_is_not_a_directory_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not a directory"):
            FileSource(path, "here", lambda event: None)


def test_an_unreadable_file_keeps_its_last_state_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(manifest("web"))
    reading, _ = step(tmp_path, Reading())

    def reject(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", reject)
    reading, events = step(tmp_path, reading)
    assert events == [Invalid(manifest_folder.FILE, "a.yaml", "cannot read a.yaml: Permission denied")]
    monkeypatch.undo()
    reading, events = step(tmp_path, reading)
    assert events == []
    assert reading.invalid == ()


def test_a_file_that_vanishes_while_it_is_read_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(manifest("web"))
    (tmp_path / "b.json").write_bytes(msgspec.json.encode(service_object("api")))
    reading, _ = step(tmp_path, Reading())
    real = Path.read_bytes

    def vanish(path: Path) -> bytes:
        path.unlink()
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", vanish)
    assert sorted(step(tmp_path, reading)[1], key=repr) == [
        ServiceChanged(API, None),
        ServiceChanged(WEB, None),
    ]
