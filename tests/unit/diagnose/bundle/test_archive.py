"""The archive: its parts, those that fail, and its file."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from ebpfproxy.diagnose.bundle import archive
from ebpfproxy.diagnose.bundle.anonymize import Anonymizer
from ebpfproxy.diagnose.bundle.archive import Content, Part
from ebpfproxy.errors import ConfigError, NotFound


def _fail() -> Content:
    raise NotFound("no maps, token: abc")


def _break() -> Content:
    raise ZeroDivisionError("by\nzero")


_PARTS = (
    Part("a.txt", "first", lambda: Content("password: x\nservice=shop/cart\n", "exit code 1")),
    Part("b.txt", "second", _fail),
    Part("c.txt", "third", _break),
    Part(
        "d/e.json",
        "fourth",
        lambda: Content('{"service": "shop/cart", "address": "10.1.2.3", "other": ["abc"]}'),
        frozenset({"service", "address"}),
    ),
    Part("f.txt", "fifth", lambda: Content("--mode=ebpf\n--other=abc\n"), frozenset({"mode"})),
)


def _read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as opened:
        found = {each.name: opened.extractfile(each) for each in opened}
        return {name.partition("/")[2]: file.read().decode() for name, file in found.items() if file}


def test_parts_that_fail_are_named_and_the_others_are_written(tmp_path: Path) -> None:
    path = tmp_path / "node1.tar.gz"
    entries = archive.write(path, archive.collect(_PARTS), io.BytesIO())
    files = _read(path)
    assert files.keys() == {"a.txt", "d/e.json", "f.txt", "contents.json"}
    assert files["a.txt"] == "password: REDACTED\nservice=shop/cart\n"
    assert [(each.file, each.error) for each in entries] == [
        ("a.txt", ""),
        ("b.txt", "no maps, token: REDACTED"),
        ("c.txt", "ZeroDivisionError: by zero"),
        ("d/e.json", ""),
        ("f.txt", ""),
    ]
    assert json.loads(files["d/e.json"])["other"] == "REDACTED"
    assert files["f.txt"] == "--mode=ebpf\n--other=REDACTED\n"
    assert json.loads(files["contents.json"]) == [each._asdict() for each in entries]
    assert (entries[0].size, entries[0].note) == (len(files["a.txt"]), "exit code 1")
    assert path.stat().st_mode & 0o777 == 0o600


def test_names_of_a_part_are_replaced_in_all_parts(tmp_path: Path) -> None:
    parts = (Part("z.txt", "cart of shop", lambda: Content("shop cart 10.1.2.3")), *_PARTS)
    anonymizer = Anonymizer(b"key")
    path = tmp_path / "node1.tar.gz"
    archive.write(path, archive.collect(parts, anonymizer), io.BytesIO())
    files = _read(path)
    text = "".join(files[name] for name in ("z.txt", "a.txt", "d/e.json"))
    assert not [word for word in ("shop", "cart", "10.1.2.3") if word in text]
    assert files["z.txt"].split()[2] == json.loads(files["d/e.json"])["address"]
    assert json.loads(files["d/e.json"])["service"] == "/".join(files["z.txt"].split()[:2])


def test_an_archive_is_written_to_a_stream() -> None:
    output = io.BytesIO()
    archive.write(None, archive.collect(_PARTS[:1]), output)
    with tarfile.open(fileobj=io.BytesIO(output.getvalue())) as opened:
        assert opened.getnames() == ["ebpfproxy-support/a.txt", "ebpfproxy-support/contents.json"]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="it exists"):
        archive.write(path, (), io.BytesIO())
    assert path.read_text() == "mine"


def test_a_missing_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        archive.write(tmp_path / "none" / "a.tar.gz", (), io.BytesIO())
