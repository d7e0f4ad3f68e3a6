"""Creates the missing maps. A map whose shape has not changed stays in use, with its contents.

New maps of Services start with the contents of those in force, so that the ids of Services and endpoints stay
valid. Entries that do not fit, or have another layout, are skipped. The first sync writes them.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ebpfproxy.backends.ebpf.migration import map_shapes
from ebpfproxy.backends.ebpf.migration.map_shapes import SERVICE_MAPS, MapShape, layout_of
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.log import Logger

log = Logger(__name__)

COPY_FAILED = "Failed to copy map contents"
"""After its size changed, a map is empty or lacks entries."""

_ARRAY, _LPM_TRIE = 2, 11  # BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_LPM_TRIE


def provide(pins: Pins, links: Path, wanted: Mapping[str, MapShape], previous: Mapping[str, Path]) -> None:
    """Pin the missing maps below `pins.maps`, and link all of `wanted` in the new folder `links`.

    A new map is pinned after it is filled, so no pinned map has an interrupted copy. `previous`: the pins in
    force, by map name. Raises KernelError and OSError.
    """
    wanted = dict(wanted)
    for name, shape in wanted.items():
        if template := _template(shape, wanted, previous):
            with contextlib.closing(Map.pinned(template)) as found:
                wanted[name] = map_shapes.for_flags(shape, found.shape.flags)
    pins.maps.mkdir(exist_ok=True)
    for unit in _units(wanted):
        if not all((pins.maps / shape.pin).exists() for shape in unit):
            _make(pins, unit, wanted, previous)
    links.mkdir(parents=True)
    for name, shape in wanted.items():
        (links / name).symlink_to(f"../../{pins.maps.name}/{shape.pin}")


def _template(shape: MapShape, wanted: Mapping[str, MapShape], previous: Mapping[str, Path]) -> Path | None:
    """The map in force that an array of maps is for. None if its layout is another one, or there is none."""
    in_force = previous.get(shape.inner)
    is_alike = in_force and layout_of(in_force.name) == wanted[shape.inner].layout
    return in_force if is_alike else None


def _units(wanted: Mapping[str, MapShape]) -> Iterator[Sequence[MapShape]]:
    """Groups of maps that are created together. An array of maps comes after the map that is its template."""
    yield [wanted[name] for name in SERVICE_MAPS]
    others = (shape for name, shape in wanted.items() if name not in SERVICE_MAPS)
    for shape in sorted(others, key=lambda shape: bool(shape.inner)):
        yield [shape]


def _make(
    pins: Pins, unit: Sequence[MapShape], wanted: Mapping[str, MapShape], previous: Mapping[str, Path]
) -> None:
    with contextlib.ExitStack() as opened:
        made: dict[str, Map] = {}
        for shape in unit:
            inner = None
            if shape.inner:
                template = _template(shape, wanted, previous) or pins.maps / wanted[shape.inner].pin
                inner = Map.pinned(template)
                opened.callback(inner.close)
            sizes = shape.key_size, shape.value_size, shape.entries
            made[shape.name] = Map.create(shape.type, *sizes, shape.flags, shape.name, inner)
            opened.callback(made[shape.name].close)
        for shape in unit:
            if shape.name in SERVICE_MAPS and shape.name in previous:
                _fill(made[shape.name], previous[shape.name], shape)
        for shape in unit:
            (pins.maps / shape.pin).unlink(missing_ok=True)  # an interrupted run may have pinned some maps
            made[shape.name].pin(pins.maps / shape.pin)


def _fill(target: Map, previous: Path, shape: MapShape) -> None:
    """Copy the entries that fit, unless the layouts differ. A failure is only logged, since only ids are
    lost."""
    if layout_of(previous.name) != shape.layout:
        return
    try:
        with contextlib.closing(Map.pinned(previous)) as source:
            if shape.type == _ARRAY:
                with contextlib.closing(source.mapped()) as old, contextlib.closing(target.mapped()) as new:
                    size = min(len(old), len(new))
                    new[:size] = old[:size]
                return
            entries = list(itertools.islice(source.items(), shape.entries))
        if shape.type == _LPM_TRIE:  # before 5.17 without batches (f56407fa6e69)
            for key, value in entries:
                target.update(key, value)
        else:
            target.update_all(entries)
    except KernelError as failure:
        log.error(COPY_FAILED, map=shape.name, reason=failure.message)
