"""The socket hooks that a kernel has."""

import pytest

from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS, Hook
from ebpfproxy.backends.ebpf.programs import available_hooks
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.bpf import bpf


def kernel_lacks(lacking: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(program_type: int, attach_type: int, code: bytes) -> bool:
        return (program_type, attach_type) != (lacking.program_type, lacking.attach_type)

    monkeypatch.setattr(bpf, "loads", loads)


@pytest.mark.parametrize("hook", [each for each in SOCKET_HOOKS if each.optional], ids=lambda hook: hook.name)
def test_an_optional_hook_that_a_kernel_lacks_is_left_out(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_lacks(hook, monkeypatch)
    assert available_hooks() == tuple(each for each in SOCKET_HOOKS if each != hook)


@pytest.mark.parametrize(
    "hook", [each for each in SOCKET_HOOKS if not each.optional], ids=lambda hook: hook.name
)
def test_a_kernel_that_lacks_a_required_hook_is_not_supported(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_lacks(hook, monkeypatch)
    with pytest.raises(Unsupported, match=f"no cgroup hook {hook.name} "):
        available_hooks()
