"""``python -m ebpfproxy``, and the command ``ebpfproxy``."""

import gc
import signal
import sys


def main() -> int:
    """Run the command line; return the exit code.

    The agent reloads its configuration at SIGHUP. Until it can, the signal stays pending instead of ending
    the process: so it is blocked before anything is imported that takes time. Imports and the first state of
    the agent leave no garbage: without collections they take less time. Its first sync enables them.
    """
    if sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        gc.disable()
    from ebpfproxy import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
