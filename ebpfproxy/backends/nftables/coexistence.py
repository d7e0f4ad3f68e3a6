"""Checks whether mode nftables works beside the node's nft and the NAT chains of other programs."""

import contextlib
import errno
import os
import socket

from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.nft import messages, tool
from ebpfproxy.linux.nft.messages import Hook, Operation, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.linux.nft.tool import Version

SKIP = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
"""kube-proxy's environment variable. If it is not empty, the version of the kernel does not matter."""
FEATURE = "nft on the node that can read the tables"
_MIN_LINUX: Version = (5, 13, 0)
_MIN_NFT: Version = (1, 0, 1)


def nft_tool() -> Finding:
    """Check the version of Linux, and that of nft if one is in PATH. It takes 5 ms.

    nft before 1.0.1 reads all tables, whatever the command. nft 0.9.8 and older crash at rules in the form of
    newer versions, so the node's firewall can no longer be changed (kubernetes issue 122743). The kernel has
    no part in this, so no feature can be probed, and a container cannot reach the node's tool.

    Therefore kube-proxy treats Linux 5.13 as evidence of a distribution with nft 1.0.1, unless an environment
    variable is set (pkg/proxy/nftables/supported.go of kubernetes 1.36). The agent does the same: `auto`
    selects nftables only if kube-proxy would run in that mode.
    """
    found = tool.installed()
    if found and found < _MIN_NFT:
        return Finding(
            FEATURE,
            errno.EOPNOTSUPP,
            f"nft {_text(found)} may crash when it reads tables of other programs",
            f"upgrade nftables to {_text(_MIN_NFT)}; or use --proxy-mode=iptables",
        )
    linux = tool.linux()
    if linux < _MIN_LINUX and not os.environ.get(SKIP):
        return Finding(
            FEATURE,
            errno.EOPNOTSUPP,
            f"a node with Linux {_text(linux)} may have nft before {_text(_MIN_NFT)}",
            f"use Linux 5.13; or if the node has nft {_text(_MIN_NFT)}, set {SKIP}=1",
        )
    return Finding(FEATURE)


def _text(version: Version) -> str:
    return ".".join(map(str, version))


_FRONTEND, _SERVER = "127.0.0.2", "127.0.0.1"
_TIMEOUT_S = 1.0  # a reply over loopback takes much less


def nat_chains_coexist() -> bool:
    """Return whether the kernel runs the agent's chains of type nat besides those of other programs, by
    trying it over loopback in a temporary network namespace. True if that cannot be created.

    Before Linux 4.18, the first NAT chain of a connection decides, even one without rules, and no other chain
    runs (nftables wiki, "List of updates since Linux kernel 3.13"). On every node, there are NAT chains of
    the kubelet and of most network plugins.
    """
    with contextlib.suppress(KernelError, OSError), netns.throw_away():
        netns.set_loopback_up()
        with socket.create_server((_SERVER, 0)) as server, Session() as session:
            if session.commit(_operations(server.getsockname()[1])):
                return False
            return _connects()
    return True


def _connects() -> bool:
    try:
        socket.create_connection((_FRONTEND, 1), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _operations(port: int) -> list[Operation]:
    """Return operations that create an empty NAT chain, and a chain with a DNAT rule that runs after it."""
    other, own = Table("ip", "ebpfproxy-other"), Table("ip", "ebpfproxy-probe")
    rule = Rule(f"ip daddr {_FRONTEND} meta l4proto tcp dnat to {_SERVER}:{port}")
    return [
        messages.add_table(other),
        messages.add_chain(other, "nat", Hook("nat", "output", -101)),
        messages.add_table(own),
        messages.add_chain(own, "nat", Hook("nat", "output", -100)),
        *messages.add_rule(own, "nat", rule, SetNames()),
    ]
