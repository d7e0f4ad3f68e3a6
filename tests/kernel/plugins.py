"""How network plugins attach their programs, and what these write to packets that they accept.

All functions act in the network namespace of the calling thread. Sources read in November 2026.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from tests.kernel.others import NEXT, PASS, TAIL, add_filter, linked, program, remove_filters


class Plugin(NamedTuple):
    """`passes`: the verdict for an accepted packet; `writes`: the fields that are written to it before."""

    filter_name: str
    passes: int
    writes: Mapping[str, int] = {}
    priority: int = 1
    """0: the kernel chooses one."""
    by_tcx: bool = False
    """If the kernel has tcx, the plugin uses a tcx link and removes all filters of that side."""

    @contextlib.contextmanager
    def loaded(self) -> Iterator[Program]:
        """The plugin's program."""
        with program(self.passes, **self.writes) as loaded:
            yield loaded

    @contextlib.contextmanager
    def attached(self, ifindex: int, side: Side, foreign: Program, has_tcx: bool = True) -> Iterator[None]:
        """Within the block, attached in the plugin's way; `has_tcx`: whether it may use tcx."""
        if self.by_tcx and has_tcx and tcx.is_supported():
            with linked(ifindex, side, foreign, TAIL):
                remove_filters(ifindex, side)
                yield
            return
        add_filter(ifindex, side, foreign, name=self.filter_name, priority=self.priority)
        try:
            yield
        finally:
            remove_filters(ifindex, side, self.filter_name)


PLUGINS = {
    # cilium/cilium pkg/datapath/loader/tcx.go attaches at the tail, tc.go has handle 1 at
    # bpf-filter-priority (1), and removes all filters of the side once there is a link. CTX_ACT_OK is
    # TC_ACT_OK (bpf/include/bpf/ctx/skb.h). bpf/lib/common.h: MARK_MAGIC_IDENTITY is 0x0f00, together with an
    # identity in the bits 0xffff00ff; tc_index and cb[0] pass data from one program to the next.
    "cilium": Plugin(
        "cil_from_netdev-eth0",
        PASS,
        {"mark": 0x12340F05, "tc_index": 1, "cb": 0xFFFFFFFF},
        by_tcx=True,
    ),
    # aws/aws-ebpf-sdk-go pkg/tc/tc.go: handle 1 at priority 1, also where the kernel has tcx.
    # aws/aws-network-policy-agent pkg/ebpf/c/tc.v4ingress.bpf.c returns BPF_OK (0) and writes nothing.
    "aws": Plugin("handle_ingress", PASS),
    # projectcalico/calico felix/bpf/tc/attach.go: no explicit priority, so that the kernel assigns 49152 or
    # less. felix/bpf-gpl/skb.h: CALI_SKB_MARK_BYPASS is 0x03000000; at a host's devices, other packets than
    # Calico's get TC_ACT_UNSPEC (felix/bpf-gpl/tc.c).
    "calico": Plugin("cali_tc_preambl", NEXT, {"mark": 0x03000000}, priority=0),
}
