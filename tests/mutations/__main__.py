"""Runs the tests with each mutation of sampled.toml, which a tool has chosen: `make mutations`.

Stage 1 runs the tests that are likely to catch a mutation, stage 2 the others of `make test`, and stage 3,
with `--all`, those of `make test-all`. A stage ends at the first failure. A test that fails is repeated
alone, and only a second failure counts. Results are appended to a file. A second run continues; remove the
file to begin again.
"""

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutations import sampling
from tests.mutations.edit import Edit
from tests.mutations.operators import Place, edits
from tests.mutations.sampling import ROOT, Entry
from tests.mutations.stages import STAGES, Outcome, copy, run_stage

RESULTS = ROOT / "build" / "mutations.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if the place of an entry is gone, 2 if stage 1 fails without a mutation."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--choose", action="store_true", help="replace entries whose place is gone")
    parser.add_argument("--seed", type=int, help="with --choose: write a new list, keep its [[skip]] entries")
    parser.add_argument("--list", action="store_true", help="print the mutations, run no tests")
    parser.add_argument("--only", action="append", metavar="ID", help="select it; may be repeated")
    parser.add_argument(
        "--stages", type=int, default=2, choices=(1, 2, 3), help="the last stage (default: 2)"
    )
    parser.add_argument("--all", action="store_const", const=3, dest="stages", help="the same as --stages=3")
    parser.add_argument("--no-baseline", action="store_true", help="skip the run without a mutation")
    parser.add_argument("--workers", type=int, help="of pytest (default: 2 in stage 1, then 4)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: build/mutations.jsonl")
    options = parser.parse_args(arguments)
    if options.choose:
        kept = sampling.entries() if options.seed is None else []
        seed = sampling.seed() if options.seed is None else options.seed
        chosen = sampling.choose(ROOT, seed, sampling.skips(), sampling.Compiling(), kept)
        sampling.write(seed, sampling.skips(), chosen)
    selected = [entry for entry in sampling.entries() if entry.id in (options.only or [entry.id])]
    found = {entry: edit for entry in selected if (edit := edits(ROOT, entry.place.file).get(entry.place))}
    gone = [entry for entry in selected if entry not in found]
    for entry in gone:
        print(f"{entry.id}: gone: {entry.place}")
    if options.choose or options.list:
        for entry, edit in found.items():
            _show(entry, edit)
        return bool(gone)
    outcomes = _recorded(options.results)
    pending = [entry for entry in found if _is_pending(outcomes.get(entry), options.stages)]
    if pending and not _run(pending, outcomes, options):
        return 2
    _report(found, outcomes)
    return bool(gone)


def _is_pending(outcome: Outcome | None, last_stage: int) -> bool:
    return outcome is None or (not outcome.caught and outcome.stage < last_stage)


def _run(pending: Sequence[Entry], outcomes: dict[Entry, Outcome], options: argparse.Namespace) -> bool:
    """Run and record the stages that are left. False if tests fail without a mutation."""
    with tempfile.TemporaryDirectory(prefix="ebpfproxy-mutations-") as folder:
        unmutated = copy(ROOT, Path(folder) / "unmutated")
        baseline = Outcome(0) if options.no_baseline else run_stage(unmutated, "", 1, options.workers)
        if baseline.caught:
            print(f"{baseline.output}\nwithout a mutation, this test fails: {baseline.test}")
            return False
        for number, entry in enumerate(pending, 1):
            root = copy(unmutated, Path(folder) / "mutated")
            path = root / entry.place.file
            path.write_text(edits(root, entry.place.file)[entry.place].apply(path.read_text()))
            while _is_pending(outcomes.get(entry), options.stages):
                began = time.monotonic()
                stage = outcomes[entry].stage + 1 if entry in outcomes else 1
                outcomes[entry] = run_stage(root, entry.place.file, stage, options.workers)
                _record(options.results, entry, outcomes[entry], time.monotonic() - began)
            verdict = "caught" if outcomes[entry].caught else "SURVIVED"
            stage, test = outcomes[entry].stage, outcomes[entry].test
            print(f"{number:2}/{len(pending)} {entry.id}: {verdict} in stage {stage} {test}", flush=True)
            shutil.rmtree(root)
    return True


def _record(path: Path, entry: Entry, outcome: Outcome, seconds: float) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        verdict = "caught" if outcome.caught else "survived"
        row = {"id": entry.id, "place": entry.place, "verdict": verdict, "stage": outcome.stage}
        row |= {"test": outcome.test, "not_repeated": outcome.not_repeated, "seconds": round(seconds)}
        file.write(json.dumps(row) + "\n")


def _recorded(path: Path) -> dict[Entry, Outcome]:
    """The last outcome of each mutation."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        Entry(row["id"], Place(*row["place"])): Outcome(
            row["stage"], row["verdict"] == "caught", row["test"], tuple(row["not_repeated"])
        )
        for row in rows
    }


def _report(found: Mapping[Entry, Edit], outcomes: Mapping[Entry, Outcome]) -> None:
    print(f"\n{'part':10}" + "".join(f"{f'stage {stage}':>9}" for stage in STAGES) + " survived  not run")
    for part in dict.fromkeys(entry.part for entry in found):
        of_part = [outcomes.get(entry) for entry in found if entry.part == part]
        caught = [outcome.stage for outcome in of_part if outcome and outcome.caught]
        counts = [*map(caught.count, STAGES), len(of_part) - len(caught) - of_part.count(None)]
        print(f"{part:10}" + "".join(f"{count:9}" for count in (*counts, of_part.count(None))))
    for entry, edit in found.items():
        if (outcome := outcomes.get(entry)) and not outcome.caught:
            print(f"\nsurvived up to stage {outcome.stage}:")
            _show(entry, edit)


def _show(entry: Entry, edit: Edit) -> None:
    before, after = edit.lines((ROOT / entry.place.file).read_text())
    print(f"{entry.id} {entry.place}")
    print(
        textwrap.indent(textwrap.dedent(before), "  - ")
        + "\n"
        + textwrap.indent(textwrap.dedent(after), "  + ")
    )


if __name__ == "__main__":
    sys.exit(main())
