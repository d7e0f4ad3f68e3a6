"""Helper probes compared with the kernel's symbols."""

from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.hooks import SCHED_CLS
from ebpfproxy.linux.bpf import bpf

pytestmark = pytest.mark.kernel

SYMBOLS = {
    "HAVE_SK_LOOKUP_UDP": "bpf_sk_lookup_udp",
    "HAVE_FIB_LOOKUP": "bpf_skb_fib_lookup",
    "HAVE_SKC_LOOKUP_TCP": "bpf_skc_lookup_tcp",
    "HAVE_REDIRECT_NEIGH": "bpf_redirect_neigh",
    "HAVE_REDIRECT_PEER": "bpf_redirect_peer",
    "HAVE_KTIME_COARSE": "bpf_ktime_get_coarse_ns",
    "HAVE_NETNS_COOKIE": "bpf_get_netns_cookie",
    "HAVE_SET_RETVAL": "bpf_set_retval",
    "HAVE_SKC_TO_MPTCP_SOCK": "bpf_skc_to_mptcp_sock",
}
SET_4 = bytes((0xB7, 4, 0, 0))
CALL, NO_HELPER = 0x85, (30_000).to_bytes(4, "little")


def test_a_helper_is_found_if_the_kernel_has_its_function() -> None:
    """A probe with arguments that the verifier rejects would never find the helper."""
    lines = Path("/proc/kallsyms").read_text().splitlines()
    present = {line.split()[2] for line in lines}
    if "bpf_prog_load" not in present:
        pytest.skip("this kernel does not show its symbols")
    found = features.present() - {features.FIB_LOOKUP_SRC.name}
    assert found == {name for name, symbol in SYMBOLS.items() if symbol in present}


def test_a_flag_is_found_if_the_kernel_has_its_constant() -> None:
    types = Path("/sys/kernel/btf/vmlinux")
    if not types.exists():
        pytest.skip("this kernel does not show its types")
    has_constant = b"BPF_FIB_LOOKUP_SRC\0" in types.read_bytes()
    assert (features.FIB_LOOKUP_SRC.name in features.present()) == has_constant


def test_an_unknown_flag_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (1 << 4).to_bytes(4, "little")
    code = features.FIB_LOOKUP_SRC.code.replace(SET_4 + known, SET_4 + (1 << 30).to_bytes(4, "little"))
    assert code != features.FIB_LOOKUP_SRC.code
    monkeypatch.setattr(features, "FIB_LOOKUP_SRC", features.FIB_LOOKUP_SRC._replace(code=code))
    assert features.FIB_LOOKUP_SRC.name not in features.present()


@pytest.mark.parametrize("probe", features.PROBES, ids=lambda probe: probe.name)
def test_an_unknown_helper_is_not_found(probe: features.Probe) -> None:
    instructions = [probe.code[at : at + 8] for at in range(0, len(probe.code), 8)]
    first = next(i for i, each in enumerate(instructions) if each[0] == CALL)
    instructions[first] = instructions[first][:4] + NO_HELPER
    assert not bpf.loads(SCHED_CLS, 0, b"".join(instructions))
