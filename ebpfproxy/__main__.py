"""``python -m ebpfproxy``: the same as the command ``ebpfproxy``."""

import sys

from ebpfproxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
