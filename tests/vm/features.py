"""The results of the probes on this kernel, as JSON: run in a VM, or anywhere as root.

python -m tests.vm.features features.json
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.selection import MODES, choose, probe
from ebpfproxy.config import Config


class Features(NamedTuple):
    mode: str
    """The mode that `--proxy-mode=auto` selects."""
    missing: dict[str, list[str]]
    """The missing features of each mode, needed or not."""


def features() -> Features:
    config = Config()
    found = {mode.name: [f.feature for f in probe(mode, config) if not f.present] for mode in MODES}
    return Features(choose(config).mode.name, found)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(features()._asdict(), indent=1))
