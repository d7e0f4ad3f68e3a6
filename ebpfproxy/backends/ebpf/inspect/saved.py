"""A saved dump: the output of ``ebpfproxy dump all -o json``, and the view of such a file.

The file is one JSON object. Its member "header" is a `Header`. Each other member is a section: a list of
objects, whose members are the fields of the section's row type. Unknown members are ignored, so that a later
version may add sections and fields without a new format number.
"""

import functools
import os
import typing
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ebpfproxy import __version__
from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow, SocketRow
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.flow_view import FlowRow, TranslationRow
from ebpfproxy.backends.ebpf.inspect.view import (
    CounterRow,
    EndpointRow,
    MapRow,
    NetworkRow,
    RangeRow,
    ServiceRow,
    SettingRow,
)
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.counters import OTHER, ServiceTraffic

FORMAT = 1
"""The format that this version writes, and the newest one that it reads.

A change that earlier versions cannot read gets the next number.
"""

SAVE = "ebpfproxy dump all -o json"
"""The command that writes a saved dump."""

Row = TypeVar("Row", bound=tuple[Any, ...])


class Header(NamedTuple):
    """What a saved dump says of itself.

    `ebpfproxy` and `kernel` are versions. `time` is the UTC time at the start of the dump, in ISO 8601.
    `filters` are the flags that limited the rows, for example "--service=default/web"; empty: all rows.
    """

    format: int
    ebpfproxy: str
    time: str
    node: str
    mode: str
    kernel: str
    filters: list[str]


def new_header(node: str, mode: str, filters: Sequence[str] = ()) -> Header:
    """The header of a dump that starts now, on this machine."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(FORMAT, __version__, now, node, mode, os.uname().release, list(filters))


_ROWS: tuple[Any, ...] = (
    *(ServiceRow, EndpointRow, RangeRow, AffinityRow, SocketRow, FlowRow, TranslationRow, DeviceRow),
    *(NetworkRow, SettingRow, CounterRow, ServiceTraffic, MapRow),
)
FIELDS = frozenset(field for row in (Header, *_ROWS) for field in row._fields)
"""The members of the header and of all rows."""


class SavedView:
    """The rows of a saved dump, as a `DumpView`.

    Raises ConfigError if the file cannot be read, or is not a complete saved dump. A method raises it if the
    file does not have that section, because a filter left it out.
    """

    header: Header

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members = _read(path)
        self.header = _header(path, self._members.pop("header", None))

    def close(self) -> None:
        """Release the content."""
        self._members = {}

    def services(self) -> list[ServiceRow]:
        return self._rows("services", ServiceRow)

    def endpoints(self) -> list[EndpointRow]:
        return self._rows("endpoints", EndpointRow)

    def ranges(self) -> list[RangeRow]:
        return self._rows("ranges", RangeRow)

    def affinity(self) -> list[AffinityRow]:
        return self._rows("affinity", AffinityRow)

    def sockets(self) -> list[SocketRow]:
        return self._rows("sockets", SocketRow)

    def conntrack(self) -> list[FlowRow]:
        return self._rows("conntrack", FlowRow)

    def nat(self) -> list[TranslationRow]:
        return self._rows("nat", TranslationRow)

    def devices(self) -> list[DeviceRow]:
        return self._rows("devices", DeviceRow)

    def networks(self) -> list[NetworkRow]:
        return self._rows("networks", NetworkRow)

    def settings(self) -> list[SettingRow]:
        return self._rows("settings", SettingRow)

    def counters(self) -> list[CounterRow]:
        return self._rows("counters", CounterRow)

    def traffic(self) -> list[ServiceTraffic]:
        return self._rows("traffic", ServiceTraffic)

    def maps(self) -> list[MapRow]:
        return self._rows("maps", MapRow)

    @property
    def counts_services(self) -> bool:
        """Whether the agent counted the traffic of some services separately, as far as the rows show it."""
        rows = self.traffic()
        return not rows or any(row.service != OTHER for row in rows)

    def _rows(self, section: str, row_type: type[Row]) -> list[Row]:
        import msgspec

        if section not in self._members:
            raise ConfigError(
                f"the saved dump {self._path} has no section {section}",
                f"save all of it with `{SAVE}`, without --service and --address",
            )
        struct = _struct(row_type)
        try:
            found = msgspec.json.decode(self._members[section], type=list[struct])  # type: ignore[valid-type]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the section {section} of the saved dump {self._path}: {error}",
                f"save it again with `{SAVE}`",
            ) from error
        return [row_type(*msgspec.structs.astuple(each)) for each in found]


def _read(path: Path) -> dict[str, Any]:
    """The members of the file, not decoded. The syntax of all of them is checked."""
    import msgspec

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the saved dump {path}: {error.strerror}", "check --from-dump"
        ) from error
    if not content.strip():
        raise ConfigError(f"cannot read the saved dump {path}: it is empty", f"save it with `{SAVE}`")
    try:
        return msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = "it is truncated" if "truncated" in str(error) else f"it is not a JSON object ({error})"
        raise ConfigError(f"cannot read the saved dump {path}: {reason}", f"save it with `{SAVE}`") from error


def _header(path: Path, packed: bytes | None) -> Header:
    import msgspec

    if packed is None:
        raise ConfigError(f"cannot read the saved dump {path}: it has no header", f"save it with `{SAVE}`")
    try:
        number = msgspec.json.decode(packed, type=_struct(_Format)).format
        if number > FORMAT:
            raise ConfigError(
                f"cannot read the saved dump {path}: its format is {number}, and ebpfproxy {__version__} "
                f"reads up to {FORMAT}",
                "use the version of ebpfproxy that wrote it, which its header names, or a later one",
            )
        return Header(*msgspec.structs.astuple(msgspec.json.decode(packed, type=_struct(Header))))
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"cannot read the header of the saved dump {path}: {error}", f"save it with `{SAVE}`"
        ) from error


class _Format(NamedTuple):
    format: int


@functools.cache
def _struct(row_type: type[tuple[Any, ...]]) -> Any:
    """A msgspec struct with the fields of a NamedTuple, which msgspec itself would read from an array.

    Fields with a default may be absent.
    """
    import msgspec

    defaults = getattr(row_type, "_field_defaults", {})
    types = typing.get_type_hints(row_type)
    fields = [(name, types[name], *([defaults[name]] if name in defaults else [])) for name in types]
    return msgspec.defstruct(row_type.__name__, fields)
