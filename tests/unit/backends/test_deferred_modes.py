"""Modes are imported when they are used."""

import subprocess
import sys

from ebpfproxy.backends.ebpf.mode import EbpfMode
from ebpfproxy.backends.interface import Mode
from ebpfproxy.backends.iptables.mode import IptablesMode
from ebpfproxy.backends.ipvs.mode import IpvsMode
from ebpfproxy.backends.nftables.mode import NftablesMode
from ebpfproxy.backends.selection import MODES
from ebpfproxy.backends.userspace.mode import UserspaceMode


def test_the_deferred_modes_have_the_facts_of_the_modes() -> None:
    modes: tuple[Mode, ...] = (EbpfMode(), NftablesMode(), IptablesMode(), IpvsMode(), UserspaceMode())
    facts = [(mode.name, mode.uses_kernel_nat) for mode in modes]
    assert [(mode.name, mode.uses_kernel_nat) for mode in MODES] == facts


def test_the_agent_imports_neither_a_mode_nor_a_source_before_it_uses_it() -> None:
    """An import of everything takes 0.2 s longer, in which a new node has no Services."""
    code = "import sys, ebpfproxy.agent.daemon; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {name for name in done.stdout.split() if name.startswith("ebpfproxy.backends.")}
    assert packages == {
        f"ebpfproxy.backends.{name}" for name in ("delta", "difference", "findings", "interface", "selection")
    }
    assert not {"pyroute2", "kubernetes", "urllib3", "asyncio", "subprocess"} & set(done.stdout.split())
