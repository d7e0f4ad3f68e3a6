"""The list sampled.toml: how its mutations are chosen, read and written."""

import itertools
import json
import random
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.backends.ebpf import programs
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import compiler
from ebpfproxy.linux.bpf.object_file import ProgramCode
from tests.mutations.edit import Edit
from tests.mutations.operators import Place, edits

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = Path(__file__).with_name("sampled.toml")
_HEADER = """\
# The mutations that `python -m tests.mutations --choose` has chosen; see CONTRIBUTING.md.
# If code moves, change its `file`, `function` or `ordinal`; if it is gone, choose again.
# [[skip]]: what no test can observe.
"""


class Stratum(NamedTuple):
    """`files`: patterns of the files of which it has `number` mutations."""

    part: str
    number: int
    files: Sequence[str]


_BACKENDS = "ebpfproxy/backends"
STRATA = (
    Stratum("plan", 12, ["ebpfproxy/plan/*.py"]),
    Stratum("backends", 8, [f"{_BACKENDS}/ebpf/**/*.py"]),
    Stratum("backends", 4, [f"{_BACKENDS}/nftables/*.py"]),
    Stratum("backends", 4, [f"{_BACKENDS}/iptables/*.py"]),
    Stratum("backends", 2, [f"{_BACKENDS}/ipvs/*.py"]),  # few machines have IPVS
    Stratum("backends", 3, [f"{_BACKENDS}/userspace/**/*.py"]),
    Stratum("backends", 3, [f"{_BACKENDS}/netfilter/*.py", f"{_BACKENDS}/*.py"]),
    Stratum("agent", 12, ["ebpfproxy/agent/*.py"]),
    Stratum("bpf", 12, ["bpf/*.h", "bpf/*.c"]),
)


class Entry(NamedTuple):
    """A mutation of the list. `id`: its part and a number."""

    id: str
    place: Place

    @property
    def part(self) -> str:
        return self.id.partition("-")[0]


class Skip(NamedTuple):
    """What is not chosen: with `operator` "" the function, with `ordinal` 0 all edits of the operator."""

    reason: str
    file: str
    function: str
    operator: str = ""
    ordinal: int = 0

    def matches(self, place: Place) -> bool:
        return all(own in ("", 0, other) for own, other in zip(self[1:], place, strict=True))


def entries() -> list[Entry]:
    return [Entry(each.pop("id"), Place(**each)) for each in _read("mutation")]


def skips() -> list[Skip]:
    return [Skip(**each) for each in _read("skip")]


def _read(table: str) -> list[dict[str, Any]]:
    return list(_content().get(table, []))


def seed() -> int:
    return int(_content().get("seed", 1))


def _content() -> dict[str, Any]:
    return tomllib.loads(SAMPLED.read_text()) if SAMPLED.exists() else {}


def write(seed: int, skipped: Sequence[Skip], chosen: Sequence[Entry]) -> None:
    rows = [("skip", skip._asdict()) for skip in skipped]
    rows += [("mutation", {"id": entry.id, **entry.place._asdict()}) for entry in chosen]
    tables = (
        "\n".join([f"[[{name}]]", *(f"{key} = {json.dumps(value)}" for key, value in row.items() if value)])
        for name, row in rows
    )
    SAMPLED.write_text("\n\n".join([f"{_HEADER}seed = {seed}", *tables]) + "\n")


def choose(
    root: Path,
    seed: int,
    skipped: Sequence[Skip],
    is_useful: Callable[[Place, Edit], bool],
    kept: Sequence[Entry] = (),
) -> list[Entry]:
    """At most one mutation of each function. The result depends only on the code and the arguments.

    Entries of `kept` stay as they are, so that runs can be compared, except those whose place is gone.
    """
    chosen = [entry for entry in kept if entry.place in edits(root, entry.place.file)]
    for part, number, patterns in STRATA:
        files = {str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)}
        found = {place: edit for file in files for place, edit in edits(root, file).items()}
        functions = {entry.place[:2] for entry in chosen if entry.place.file in files}
        for place in sorted(found, key=lambda place: _order(seed, place)):
            if len(functions) >= number:
                break
            function = place.file, place.function
            skip = function in functions or any(each.matches(place) for each in skipped)
            if not skip and is_useful(place, found[place]):
                functions.add(function)
                used = {entry.id for entry in chosen}
                free = (f"{part}-{ordinal:02}" for ordinal in itertools.count(1))
                chosen.append(Entry(next(each for each in free if each not in used), place))
    parts = [stratum.part for stratum in STRATA]
    return sorted(chosen, key=lambda entry: (parts.index(entry.part), entry.id))


def _order(seed: int, place: Place) -> tuple[float, ...]:
    """Functions in random order, then their operators: otherwise frequent operators would be most."""
    keys = (place[:2], place[:3], place)
    return tuple(random.Random(f"{seed} {key}").random() for key in keys)


class Compiling:
    """Whether mutated code compiles, and for C also whether the programs differ from the unmutated ones."""

    def __init__(self) -> None:
        self._unmutated = _programs(ROOT / "bpf")

    def __call__(self, place: Place, edit: Edit) -> bool:
        mutated = edit.apply((ROOT / place.file).read_text())
        try:
            if place.file.endswith(".py"):
                compile(mutated, place.file, "exec")
                return True
            with tempfile.TemporaryDirectory() as folder:
                source = Path(shutil.copytree(ROOT / "bpf", Path(folder) / "bpf"))
                (source / Path(place.file).name).write_text(mutated)
                return _programs(source) != self._unmutated
        except (SyntaxError, KernelError):
            return False


def _programs(source: Path) -> tuple[ProgramCode, ...]:
    files = [source / path.name for path in programs.sources()]
    return compiler.compile_sources(files, COMPILED_SIZES.defines()).programs
