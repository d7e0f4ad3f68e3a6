"""What network plugins leave on a node, made with real devices, chains, tables and programs.

The names and rules are those that the plugins create (sources: ebpfproxy/diagnose/doctor/plugins.py). All
functions act in the network namespace of the calling thread.
"""

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from tests.kernel.others import add_filter, linked
from tests.support.bpf_place import CONNECT4, RETURN_1, load_program

_SCHED_CLS = 3


class Node:
    """A node in the making: a folder for CNI files, and a cgroup for programs of sockets."""

    def __init__(self, cni: Path, at: Path, stack: contextlib.ExitStack) -> None:
        self.cni = cni
        self.cgroup = at
        self._stack = stack
        self._peers = 0

    def cni_file(self, name: str, network: str, *types: str) -> None:
        plugins = [{"type": each} for each in types]
        self.cni.mkdir(exist_ok=True)
        (self.cni / name).write_text(json.dumps({"cniVersion": "1.0.0", "name": network, "plugins": plugins}))

    def device(self, *names: str) -> None:
        """A kernel of a test may lack other kinds; the names are what matters."""
        for name in names:
            self._peers += 1
            subprocess.run(f"ip link add {name} type veth peer name pod{self._peers}".split(), check=True)

    def bridge(self, name: str) -> None:
        subprocess.run(f"ip link add {name} type bridge".split(), check=True)

    def iptables(self, text: str, backend: str = "nft") -> None:
        subprocess.run([f"iptables-{backend}-restore", "-w", "--noflush"], input=text, text=True, check=True)

    def nft(self, text: str) -> None:
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)

    def socket_program(self, name: str) -> None:
        """Attached to connect4 of the cgroup. The kernel keeps 15 characters of the name."""
        program = load_program(name=name[:15].encode())
        self._stack.callback(program.close)
        cgroup.attach_multi(program, self.cgroup, CONNECT4, None)
        self._stack.callback(cgroup.detach, program, self.cgroup, CONNECT4)

    def tcx_link(self, device: str, name: str) -> None:
        """A program at ingress, by a tcx link (Linux 6.6)."""
        program = Program.load(_SCHED_CLS, 0, RETURN_1, name)
        self._stack.callback(program.close)
        self._stack.enter_context(linked(socket.if_nametoindex(device), Side.INGRESS, program))

    def filter(self, device: str, name: str) -> None:
        """A tc filter at ingress."""
        program = Program.load(_SCHED_CLS, 0, RETURN_1)
        self._stack.callback(program.close)
        add_filter(socket.if_nametoindex(device), Side.INGRESS, program, name=name)


@contextlib.contextmanager
def node(cni: Path, at: Path) -> Iterator[Node]:
    """`at`: the cgroup. Programs are detached afterwards."""
    with contextlib.ExitStack() as stack:
        yield Node(cni, at, stack)


def flannel(node: Node) -> None:
    node.cni_file("10-flannel.conflist", "cbr0", "flannel", "portmap")
    node.bridge("cni0")
    node.device("flannel.1")
    node.iptables(
        "*nat\n:FLANNEL-POSTRTG - [0:0]\n"
        '-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG\n'
        "-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n"
        "-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE\nCOMMIT\n"
        "*filter\n:FLANNEL-FWD - [0:0]\n-A FORWARD -j FLANNEL-FWD\n"
        "-A FLANNEL-FWD -s 10.244.0.0/16 -j ACCEPT\nCOMMIT\n"
    )


def calico_iptables(node: Node) -> None:
    node.cni_file("10-calico.conflist", "k8s-pod-network", "calico", "bandwidth", "portmap")
    node.device("cali0123456789a", "vxlan.calico")
    node.iptables(
        "*filter\n:cali-FORWARD - [0:0]\n:cali-from-wl-dispatch - [0:0]\n-A FORWARD -j cali-FORWARD\n"
        "-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000\n"
        "-A cali-FORWARD -i cali+ -j cali-from-wl-dispatch\n"
        "-A cali-from-wl-dispatch -j MARK --set-xmark 0x10000/0x10000\nCOMMIT\n",
        "legacy",
    )


def calico_nftables(node: Node) -> None:
    node.cni_file("10-calico.conflist", "k8s-pod-network", "calico")
    node.device("cali0123456789a")
    node.nft(
        "table ip calico {\n chain filter-cali-FORWARD {\n meta mark set meta mark & 0xfff1ffff\n }\n}\n"
    )


def calico_ebpf(node: Node) -> None:
    node.cni_file("10-calico.conflist", "k8s-pod-network", "calico")
    node.device("cali0123456789a", "bpfin.cali")
    node.filter("cali0123456789a", "cali_tc_preambl")
    node.socket_program("calico_connect_v4")


def cilium(node: Node) -> None:
    node.cni_file("05-cilium.conflist", "cilium", "cilium-cni")
    node.device("cilium_host", "cilium_vxlan", "lxc0123456789ab")
    node.filter("lxc0123456789ab", "cil_from_container-lxc0123456789ab")
    node.iptables(
        "*mangle\n:CILIUM_PRE_mangle - [0:0]\n-A PREROUTING -j CILIUM_PRE_mangle\n"
        "-A CILIUM_PRE_mangle ! -o lo -m mark --mark 0x200/0xf00 -j MARK --set-xmark 0x200/0xffffffff\n"
        "COMMIT\n"
    )


def cilium_replacing(node: Node) -> None:
    cilium(node)
    node.socket_program("cil_sock4_connect")


def aws(node: Node) -> None:
    node.cni_file("10-aws.conflist", "aws-cni", "aws-cni", "egress-cni", "portmap")
    node.device("eni0123456789a")
    node.iptables(
        "*nat\n:AWS-SNAT-CHAIN-0 - [0:0]\n:AWS-CONNMARK-CHAIN-0 - [0:0]\n"
        '-A POSTROUTING -m comment --comment "AWS SNAT CHAIN" -j AWS-SNAT-CHAIN-0\n'
        "-A PREROUTING -i eni+ -j AWS-CONNMARK-CHAIN-0\n"
        "-A PREROUTING -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80\n"
        "-A AWS-CONNMARK-CHAIN-0 -j CONNMARK --set-xmark 0x80/0x80\nCOMMIT\n"
    )


def kindnet(node: Node) -> None:
    """As in kind."""
    node.cni_file("10-kindnet.conflist", "kindnet", "ptp", "portmap")
    node.device("veth12345678")
    node.iptables(
        "*nat\n:KIND-MASQ-AGENT - [0:0]\n"
        "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j KIND-MASQ-AGENT\n"
        "-A KIND-MASQ-AGENT -d 10.244.0.0/16 -j RETURN\n-A KIND-MASQ-AGENT -j MASQUERADE\nCOMMIT\n"
    )


def kindnet_nftables(node: Node) -> None:
    """As kindnet without kind."""
    node.cni_file("10-kindnet.conflist", "kindnet", "cni-kindnet")
    node.device("knet12345678")
    node.nft("table inet kindnet-ipmasq {\n chain postrouting {\n }\n}\n")


def kube_router(node: Node) -> None:
    node.cni_file("10-kuberouter.conflist", "kubernetes", "bridge", "portmap")
    node.bridge("kube-bridge")
    node.iptables("*filter\n:KUBE-ROUTER-FORWARD - [0:0]\n-A FORWARD -j KUBE-ROUTER-FORWARD\nCOMMIT\n")


def kube_router_with_proxy(node: Node) -> None:
    kube_router(node)
    node.device("kube-dummy-if")
