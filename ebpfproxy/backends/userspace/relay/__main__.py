"""Runs a relay: `python -m ebpfproxy.backends.userspace.relay FD`. FD is the agent's control socket."""

import sys

from ebpfproxy.backends.userspace.relay import control

if __name__ == "__main__":
    control.run(int(sys.argv[1]))
