"""`ebpfproxy support-bundle` on a node with maps of mode ebpf, and without any."""

import contextlib
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from socket import htons

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.saved import SavedView
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.model.address import parse_address
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps
from tests.support.kustomize import REPOSITORY

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(services=8, slots=16, endpoints=64, affinity=8, sockets=8)
_FLAGS = ("--metrics-port=0", "--healthz-port=0", "--hostname-override=node-7", "--master=https://me:pw@h:1")


def _bundle(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "ebpfproxy", "support-bundle", *arguments, *_FLAGS]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=100, check=True)


def _files(packed: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        found = {each.name: opened.extractfile(each) for each in opened}
        return {name.partition("/")[2]: file.read().decode() for name, file in found.items() if file}


def _write_service(place: BpfPlace) -> None:
    folder = build_maps(place, _SIZES, "programs-bundle")
    Pins(place.bpffs).set_current(folder.parent)
    with contextlib.closing(Maps(folder)) as maps:
        maps["service_names"].update(bytes([1, 0, 0, 0]), abi.SERVICE_NAME.pack(b"shop/cart:http", 6, 4))
        key = abi.SERVICE_KEY.pack(parse_address("10.96.0.77"), htons(80), 6, 0)
        maps["services"].update(key, abi.SERVICE.pack(bytes(8), bytes(8), 1, 0, 0, 1, 0, 0))


def test_a_bundle_has_the_state_of_the_node_without_names(tmp_path: Path) -> None:
    path, log = tmp_path / "node.tar.gz", tmp_path / "agent.log"
    log.write_text('I1125 "Synced services" service=shop/cart node=node-7 address=10.96.0.77\n')
    with bpf_place() as place:
        _write_service(place)
        arguments = str(path), "--anonymize", f"--log={log}", f"--bpffs-root={place.bpffs}"
        shown = _bundle(*arguments).stdout.decode()
    files = _files(path.read_bytes())
    assert {"versions.json", "flags.txt", "doctor.txt", "dump.json", "agent.log", "contents.json"} <= set(
        files
    )
    assert re.search(r"FEATURE|mode:", files["doctor.txt"])
    text = "\n".join(files.values())
    assert not [each for each in ("shop", "cart", "node-7", "10.96.0.77", "me:pw") if each in text]
    assert "REDACTED" not in files["dump.json"] + files["versions.json"]
    saved = tmp_path / "dump.json"
    saved.write_text(files["dump.json"])
    (row,) = SavedView(saved).services()
    assert row.service.endswith(":http")
    assert row.service.removesuffix(":http") in files["agent.log"]
    assert row.address in files["agent.log"]
    assert all(each["file"] in shown for each in json.loads(files["contents.json"]))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = _bundle("-", f"--bpffs-root={tmp_path}", f"--log={tmp_path}/none")
    files = _files(done.stdout)
    listed = {each["file"]: each["error"] for each in json.loads(files["contents.json"])}
    assert "no maps of mode ebpf" in listed["dump.json"]
    assert "no such server" in listed["agent/metrics.txt"]
    assert "No such file" in listed["agent.log"]
    assert "left out: " in done.stderr.decode()
    assert not listed["versions.json"]
    assert "https://REDACTED@h:1" in files["flags.txt"]
