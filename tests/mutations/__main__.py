"""Shows that every mutation of mutations.toml is caught by its test: `make mutations`.

Exit code 1 if one survives, or could not be checked. `--only ID`, which may be repeated, selects one of them.
`--list` prints the mutations as a Markdown table and checks none.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence

from tests.mutations.catalog import Mutation, mutations
from tests.mutations.runner import Runner, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    every = {mutation.id: mutation for mutation in mutations()}
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="ID", choices=sorted(every), help="select it")
    parser.add_argument("--list", action="store_true", help="print the mutations, check none")
    options = parser.parse_args(arguments)
    selected = [every[name] for name in options.only or every]
    if options.list:
        _print_table(selected)
        return 0
    return _check(selected)


def _print_table(selected: Sequence[Mutation]) -> None:
    print("| mutation | file | what it breaks | test |\n|---|---|---|---|")
    for mutation in selected:
        print(f"| {mutation.id} | `{mutation.file}` | {mutation.breaks} | `{mutation.test}` |")


def _check(selected: Sequence[Mutation]) -> int:
    runner = Runner()
    caught = 0
    for number, mutation in enumerate(selected, 1):
        began = time.monotonic()
        result = runner.run(mutation)
        verdict = f"{result.verdict.value} ({time.monotonic() - began:.0f} s)"
        print(f"{number:2}/{len(selected)} {mutation.id}: {verdict}", flush=True)
        if result.verdict is Verdict.CAUGHT:
            caught += 1
            continue
        print(f"      {mutation.file}: {mutation.breaks}\n      test: {mutation.test}", flush=True)
        if result.details:
            print(textwrap.indent(result.details, "      | "), flush=True)
    print(f"{caught} of {len(selected)} mutations were caught")
    return caught < len(selected)


if __name__ == "__main__":
    sys.exit(main())
