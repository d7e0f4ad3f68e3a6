"""The complete output of an operator's tools for a few Services in mode ipvs, as text under ipvs_shown/.

After an intended change, run with ``--update-goldens`` on a kernel with IPVS.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.lab import manifests
from ebpfproxy.lab.manifests import Object
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import LocalTraffic, NodePlan
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.support import kube_proxy

pytestmark = pytest.mark.kernel

EXPECTED = Path(__file__).with_name("ipvs_shown")
HERE = "here"
PODS = {Family.IPV4: "10.1.0.0/16", Family.IPV6: "fd01::/64"}
NODE = NodePlan(
    node_port_networks=frozenset(map(parse_network, ("192.0.2.1/32", "2001:db8::1/128"))),
    local_traffic={of: LocalTraffic(parse_network(pods)) for of, pods in PODS.items()},
)
TOOLS = {
    "ipvsadm": "ipvsadm -Ln",
    "ipset": "ipset list -sorted",
    "iptables-save": "iptables-nft-save",
    "ip6tables-save": "ip6tables-nft-save",
}


def services() -> list[Object]:
    """Both families; session affinity; a NodePort; load balancers with policy Local and with source ranges;
    no endpoints."""
    port = manifests.port
    balanced: Object = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 32000,
        "loadBalancerSourceRanges": ["198.51.100.0/24"],
    }
    front = manifests.service("front", ["10.96.0.40"], [port(443, node_port=30443)], **balanced)
    front["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.5"}]}}
    return [
        manifests.service("web", ["10.96.0.10", "fd96::10"], [port(80)], sessionAffinity="ClientIP"),
        manifests.endpoint_slice("web-4", "web", ["10.1.0.1", "10.1.0.2"], [port(8080)]),
        manifests.endpoint_slice("web-6", "web", ["fd01::1", "fd01::2"], [port(8080)]),
        manifests.service("dns", ["10.96.0.20"], [port(53, protocol="UDP", node_port=30053)]),
        manifests.endpoint_slice("dns-4", "dns", ["10.1.0.3"], [port(5353, protocol="UDP")]),
        manifests.service("empty", ["10.96.0.30"], [port(80)], externalIPs=["203.0.113.7"]),
        front,
        manifests.endpoint_slice(
            "front-4",
            "front",
            [manifests.endpoint("10.1.0.4", node=HERE), manifests.endpoint("10.1.0.5", node="elsewhere")],
            [port(8443)],
        ),
    ]


@pytest.fixture(scope="module")
def _served() -> Iterator[None]:
    with netns.throw_away():
        skip_without_ipvs("ipvs")
        subprocess.run(
            ["ip", "link", "set", "lo", "up"], check=True
        )  # without routes IPVS rejects real servers
        plane = IpvsBackend(IpvsSettings(), "nft")
        plane.open()
        plans = kube_proxy.plans_of(services(), HERE, list(PODS.values()))
        rejected = plane.apply(diff(plane.read(), plane.render(plans, NODE)))
        assert not [str(why) for why in rejected.values()]
        yield
        plane.close()


def _blocks(text: str, begins: str) -> list[str]:
    """The blocks that begin with such a line, sorted; the indented lines in them, too."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if re.match(begins, line):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line.rstrip())
    return sorted("\n".join([head, *sorted(rest)]) for head, *rest in blocks)


def of_ipvsadm(text: str) -> list[str]:
    return _blocks(text, "TCP|UDP|SCTP")


def of_ipset(text: str) -> list[str]:
    """The sets without memory size and hash parameters, which depend on the kernel."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(("Size in memory", "Revision"))]
        found.append("\n".join(re.sub(r" (bucketsize|hashsize|initval) \S+", "", line) for line in lines))
    return sorted(found)


def of_iptables(text: str) -> list[str]:
    """Chains sorted by name, rules in their order. Counters are set to 0."""
    found = []
    for table in re.split(r"^\*", text, flags=re.MULTILINE)[1:]:
        name, *lines = table.splitlines()
        chains = sorted(re.sub(r"\[\d+:\d+\]", "[0:0]", line) for line in lines if line.startswith(":"))
        rules = sorted((line for line in lines if line.startswith("-A")), key=lambda rule: rule.split()[1])
        found.append("\n".join([f"*{name}", *chains, *rules]))
    return sorted(found)


PARTS = {
    "ipvsadm": of_ipvsadm,
    "ipset": of_ipset,
    "iptables-save": of_iptables,
    "ip6tables-save": of_iptables,
}


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_show_the_expected_state_of_mode_ipvs(tool: str, request: pytest.FixtureRequest) -> None:
    output = subprocess.run(TOOLS[tool].split(), capture_output=True, text=True, check=True).stdout
    text = "\n".join(PARTS[tool](output)) + "\n"
    path = EXPECTED / f"{tool}.txt"
    if request.config.getoption("--update-goldens"):
        EXPECTED.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
