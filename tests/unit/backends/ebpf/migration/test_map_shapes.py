"""Which maps get another pin after a change of the sources or the sizes."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.migration import map_shapes
from ebpfproxy.backends.ebpf.migration.map_shapes import SERVICE_MAPS, MapShape

SIZES = MapSizes()
FLOW_MAPS = {"flows", "replies", "half_open_flows"}


def read(source: Path, sizes: MapSizes = SIZES) -> dict[str, MapShape]:
    return map_shapes.read(source, sizes.defines())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("abi.h", "maps.h"):
        shutil.copy(abi.source_directory() / name, tmp_path)
    return tmp_path


def edit(source: Path, name: str, old: str, new: str) -> None:
    text = (source / name).read_text()
    assert old in text
    (source / name).write_text(text.replace(old, new))


def changed(source: Path, sizes: MapSizes = SIZES) -> set[str]:
    """The maps whose pin differs from that of this version."""
    before, after = read(abi.source_directory()), read(source, sizes)
    assert before.keys() == after.keys()
    return {name for name, shape in after.items() if shape.pin != before[name].pin}


def relaid(source: Path) -> set[str]:
    """The maps whose layout differs, so that their contents cannot be used."""
    before, after = read(abi.source_directory()), read(source)
    return {name for name, shape in after.items() if shape.layout != before[name].layout}


def test_a_comment_changes_nothing(source: Path) -> None:
    edit(source, "abi.h", "/* Key of `services`:", "/* The key of `services`,\n * as connected to:")
    edit(source, "maps.h", "/* Hash maps", '/* PINNED("hash", u32, u32, odd, 1, 0);\n * Hash maps')
    assert changed(source) == set()


def test_a_new_unused_struct_or_another_order_of_structs_changes_nothing(source: Path) -> None:
    text = (source / "abi.h").read_text()
    node = text[text.index("struct node {") : text.index("enum device_flag")]
    unrelated = "struct unrelated {\n\t__u32 one;\n};\n"
    (source / "abi.h").write_text(text.replace(node, "") + node + unrelated)
    assert changed(source) == set()


@pytest.mark.parametrize(
    ("size", "maps"),
    [
        ("flows", FLOW_MAPS),
        ("affinity", {"affinity"}),
        ("sockets", {"socket_peers", "socket_flows"}),
        ("endpoints", set(SERVICE_MAPS)),
        ("services", set(SERVICE_MAPS)),
        ("traffic", {"traffic"}),
    ],
)
def test_another_size_changes_its_maps_only(source: Path, size: str, maps: set[str]) -> None:
    assert changed(source, dataclasses.replace(SIZES, half_open=0, **{size: 4096})) == maps


def test_another_field_changes_the_maps_that_have_it(source: Path) -> None:
    edit(source, "abi.h", "\t__u64 seen; /* as flow", "\t__u64 came; /* as flow")
    assert relaid(source) == changed(source) == {"fragments"}


@pytest.mark.parametrize(
    "new", ["__be16 frontend_port;\n\t__be16 client_port;", "__u16 client_port;\n\t__be16 frontend_port;"]
)
def test_another_order_or_type_of_fields_is_another_layout(source: Path, new: str) -> None:
    edit(source, "abi.h", "__be16 client_port;\n\t__be16 frontend_port;", new)
    assert relaid(source) == {"events", "replies", "previous_replies"}  # two structs have these fields


def test_a_change_of_a_nested_struct_changes_the_layout(source: Path) -> None:
    edit(source, "abi.h", "\t__u32 count;\n};", "\t__u32 many;\n};")
    assert relaid(source) == {"services"}
    assert changed(source) == set(SERVICE_MAPS)


def test_a_number_that_becomes_a_struct_is_another_layout(source: Path) -> None:
    """The value of `frontend_addresses` was the number 1 before it named clients."""
    edit(source, "maps.h", "struct frontend_address, frontend_addresses", "u32, frontend_addresses")
    assert relaid(source) == {"frontend_addresses"}
    assert changed(source) == set(SERVICE_MAPS)


def test_maps_with_ids_change_with_the_layout_of_endpoints(source: Path) -> None:
    edit(source, "abi.h", "/* enum endpoint_flag, and the weight */\n", "\n")
    assert relaid(source) == set()
    edit(
        source,
        "abi.h",
        "\t__u16 flags;\t  \n\t__u32 service_id; /* 0:",
        "\t__u16 bits;\n\t__u32 service_id; /* 0:",
    )
    assert {"endpoints", "slots", "flows", "socket_flows", "socket_peers", "affinity"} <= relaid(source)
    assert not {"devices", "node", "netfilter_flows"} & relaid(source)


def test_an_array_of_maps_changes_with_its_template(source: Path) -> None:
    edit(
        source,
        "maps.h",
        'PINNED("hash", struct flow_key, struct flow, flows',
        'PINNED("lru_hash", struct flow_key, struct flow, flows',
    )
    assert changed(source) == {"flows", "previous_flows"}


@pytest.mark.parametrize(
    "line", ['PINNED("queue of", u32, u32, odd, 1, 0);', 'PINNED("hash", u32, u32, odd, 2 * 8, 0);']
)
def test_a_map_that_cannot_be_read_is_an_error(source: Path, line: str) -> None:
    (source / "maps.h").write_text((source / "maps.h").read_text() + line)
    with pytest.raises(ValueError, match="cannot be read"):
        read(source)


def test_names_of_pins_have_no_dots_and_contain_the_layout() -> None:
    for name, shape in read(abi.source_directory()).items():
        assert "." not in shape.pin
        assert shape.pin.startswith(f"{name}-")
        assert map_shapes.layout_of(shape.pin) == shape.layout
    assert map_shapes.layout_of("flows") == ""
