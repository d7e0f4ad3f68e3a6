"""Places in the documentation. tests/unit/diagnose/test_doctor_links.py checks that each heading exists."""

import enum

DOCS = "docs/"
"""The folder of the pages in the repository. Links are paths there, as in the alerts: the repository has no
public address."""


class Page(enum.StrEnum):
    """Headings of the documentation, by file and anchor."""

    EBPF_FEATURES = "kernels.md#what-does-each-feature-of-mode-ebpf-need"
    EBPF_START = "troubleshooting.md#errors-at-the-start"
    STALE_SOCKETS = "troubleshooting.md#connections-end-or-go-to-an-endpoint-that-is-gone"
    SOCKET_PATH = "dataplanes/ebpf.md#which-clients-use-the-socket-path"
    FIRST_PLACE = "other-programs.md#programs-of-others-at-the-same-device"
    NFTABLES = "dataplanes/nftables.md#requirements"
    IPTABLES = "dataplanes/iptables.md#requirements"
    IPVS = "operations.md#modules-of-mode-ipvs"
    USERSPACE = "dataplanes/userspace.md#requirements"
    UPLINKS = "other-programs.md#several-uplinks-and-routing-rules"
    FIREWALLS = "other-programs.md#where-must-a-rule-be-in-each-mode"
    FORWARD = "other-programs.md#forward-drops-packets"
    BRIDGES = "other-programs.md#pods-of-one-bridge"
    REDIRECT = "other-programs.md#when-must-i-not-use---ebpf-redirect"
    DIRECT_RETURN = "direct-server-return.md#enable-it"
    XDP = "xdp.md#why-does-a-device-work-without-xdp"
    DOCTOR = "diagnose.md#what-does-doctor-read"
    PLUGINS = "other-programs.md#what-do-i-set-for-my-network-plugin"
    MASQUERADE_BIT = "other-programs.md#which-masquerade-bit-is-free"
    OTHER_PROXY = "other-programs.md#another-service-proxy-runs"
    LEFT_OVER = "other-programs.md#rules-of-a-stopped-proxy"
    MIGRATION = "migration.md#migrate-one-node"
    PORTS = "troubleshooting.md#the-pod-is-not-ready-or-exits"

    @property
    def path(self) -> str:
        """The page and heading, below the root of the repository."""
        return DOCS + self.value
