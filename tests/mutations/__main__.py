"""Shows that every mutation of mutations.toml is caught by its test: `make mutations`.

Exit code 1 if one survives, or could not be checked. `--only ID`, which may be repeated, checks one of them.
"""

import argparse
import sys
import textwrap
import time

from tests.mutations.catalog import mutations
from tests.mutations.runner import Runner, Verdict


def main() -> int:
    every = {mutation.id: mutation for mutation in mutations()}
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="ID", choices=sorted(every), help="check this one")
    chosen = parser.parse_args().only or list(every)
    runner = Runner()
    caught = 0
    for number, mutation in enumerate((every[name] for name in chosen), 1):
        began = time.monotonic()
        result = runner.run(mutation)
        seconds = time.monotonic() - began
        print(f"{number:2}/{len(chosen)} {mutation.id}: {result.verdict.value} ({seconds:.0f} s)", flush=True)
        if result.verdict is Verdict.CAUGHT:
            caught += 1
            continue
        print(f"      {mutation.file}: {mutation.breaks}\n      test: {mutation.test}", flush=True)
        if result.details:
            print(textwrap.indent(result.details, "      | "), flush=True)
    print(f"{caught} of {len(chosen)} mutations were caught")
    return caught < len(chosen)


if __name__ == "__main__":
    sys.exit(main())
