"""Signals, and the end of the process in limited time: real processes."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import ctypes, os, queue, sys, threading
from ebpfproxy import log
from ebpfproxy.agent.ending import Ending
from ebpfproxy.agent.signals import Signals
log.set_up(0, "text")
inbox = queue.SimpleQueue()
ending = Ending(lambda: os._exit(7), seconds=0.2)
signals = Signals(inbox, ending.begin)
signals.start()
"""
HANGING = (
    PROGRAM
    + """
threading.Thread(target=lambda: queue.SimpleQueue().get(), name="stuck-thread", daemon=True).start()
with ending.part("stuck-part"):
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(600)  # a system call in C, as of a map or a lock
"""
)
COUNTING = (
    PROGRAM
    + """
print("ready", flush=True)
print(inbox.get(), inbox.get(), flush=True)
"""
)
RESTARTING = """
import os, queue, sys
from ebpfproxy.agent import restart, signals
from ebpfproxy.agent.signals import Signals
from ebpfproxy.config import handover
from ebpfproxy.config.handover import Handover
found = handover.take()
if found is None:
    running = Signals(queue.SimpleQueue(), lambda: None)
    running.start()
    running.stop()
    os.kill(os.getpid(), 15)  # pending at the time of the restart
    restart.replace(Handover(b"a: \\xff", b"b"))
inbox = queue.SimpleQueue()
Signals(inbox, lambda: None).start()
print(os.getpid(), found, inbox.get(), sorted(each for each in os.environ if "HANDOVER" in each))
"""


DRAINING = (
    PROGRAM.replace("ending.begin)", "ending.begin, drains=True)")
    + """
print("ready", flush=True)
print(inbox.get(), signals.has_stop, flush=True)
print(inbox.get(), flush=True)
threading.Event().wait()
"""
)


def started(program: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_hangs_ends_in_time_and_names_what_did_not_end(number: signal.Signals) -> None:
    process = started(HANGING)
    process.send_signal(number)
    _, logged = process.communicate(timeout=10)
    assert process.returncode == 7
    assert "WARNING Ending without the parts that did not end in time" in logged
    assert "part=stuck-part" in logged
    assert "stuck-thread" in logged


def test_the_first_sigterm_of_an_edge_drains_and_the_second_one_ends_in_time() -> None:
    process = started(DRAINING)
    assert process.stdout
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "Drain(signal='SIGTERM') True\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "Stop(signal='SIGTERM')\n"
    process.communicate(timeout=10)
    assert process.returncode == 7


def test_sighup_does_not_end_the_process_and_is_received_in_order() -> None:
    process = started(COUNTING)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.05)  # pending signals have no order
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert output == "Reload(reason='SIGHUP') Stop(signal='SIGTERM')\n"


def test_a_restart_keeps_the_process_its_signals_and_the_content_of_the_file() -> None:
    process = subprocess.Popen([sys.executable, "-c", RESTARTING], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=10)
    expected = "Handover(content=b'a: \\xff', rejected=b'b') Stop(signal='SIGTERM') []"
    assert output == f"{process.pid} {expected}\n"


@pytest.mark.parametrize("arguments", [["-m", "ebpfproxy", "run", "--help"]])
def test_sighup_before_the_handlers_are_installed_does_not_end_the_process(arguments: list[str]) -> None:
    """SIGHUP is blocked before anything is imported that takes time."""
    program = (
        "import os, runpy, signal, sys\n"
        "class Importing:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click':\n"
        "            os.kill(os.getpid(), signal.SIGHUP)\n"
        "sys.meta_path.insert(0, Importing())\n"
        "sys.argv = ['ebpfproxy', 'run', '--help']\n"
        "runpy.run_module('ebpfproxy', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "--proxy-mode" in ended.stdout
