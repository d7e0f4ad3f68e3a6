"""Whether the node's own nft(8) can live with tables that we write.

nft before 1.0.1 reads everyone's tables, whatever it is asked for. 0.9.8 and older crash at rules in the form
that newer ones write: then the node's firewall can no longer be changed (kubernetes issue 122743). The kernel
has no part in that, so there is no feature to probe, and from a container the node's tool is out of reach.
Therefore kube-proxy takes Linux 5.13 as a sign of a distribution with nft 1.0.1, unless an environment
variable says otherwise (pkg/proxy/nftables/supported.go of kubernetes 1.36), and so do we: `auto` takes
nftables where kube-proxy would run in that mode.
"""

import errno
import os

from ebpfproxy.backends.findings import Finding
from ebpfproxy.linux.nft import tool
from ebpfproxy.linux.nft.tool import Version

SKIP = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
"""kube-proxy's environment variable: where it is not empty, the kernel's version is of no matter."""
FEATURE = "an nft on the node that reads our tables"
_LINUX: Version = (5, 13, 0)
_NFT: Version = (1, 0, 1)


def finding() -> Finding:
    """By the version of Linux, and by that of nft where one is in PATH. It takes 5 ms."""
    found = tool.installed()
    if found and found < _NFT:
        return Finding(
            FEATURE,
            errno.EOPNOTSUPP,
            f"nft {_text(found)} may crash at tables that it did not write",
            f"upgrade nftables to {_text(_NFT)}; or use --proxy-mode=iptables",
        )
    linux = tool.linux()
    if linux < _LINUX and not os.environ.get(SKIP):
        return Finding(
            FEATURE,
            errno.EOPNOTSUPP,
            f"a node with Linux {_text(linux)} may have an nft before {_text(_NFT)}",
            f"use Linux 5.13; or, where the node has nft {_text(_NFT)}, set {SKIP}=1",
        )
    return Finding(FEATURE)


def _text(version: Version) -> str:
    return ".".join(map(str, version))
