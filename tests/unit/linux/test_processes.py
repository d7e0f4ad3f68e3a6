"""Children of a process, as proc shows them."""

import os
import subprocess
import threading

from ebpfproxy.linux.processes import children


def test_children_that_end_while_they_are_listed_are_left_out() -> None:
    """An agent runs a command for each change; mode userspace was read in between and FileNotFoundError
    was raised.
    """
    ended = threading.Event()

    def run_commands() -> None:
        while not ended.is_set():
            subprocess.run(["true"], check=True)

    with subprocess.Popen(["sleep", "60"]) as stays:
        runs = threading.Thread(target=run_commands)
        runs.start()
        try:
            found = [children(os.getpid()) for _ in range(100)]
        finally:
            ended.set()
            runs.join()
            stays.kill()
    assert all(stays.pid in {each.pid for each in listed} for listed in found)


def test_a_process_that_has_ended_has_no_children() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert not children(ended.pid)
