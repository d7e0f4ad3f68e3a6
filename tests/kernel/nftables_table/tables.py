"""The tables of the calling thread's network namespace, through the backend and through `nft`."""

import re
import subprocess

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, Chain, ChainEntry, Element, Entry, Key, nft_family
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.support.nft_listing import parse

Entries = dict[Key, Entry]

NOWHERE = Rule("goto nowhere")
"""A rule that the kernel rejects."""
INVALID = Rule("ip saddr what is this")
"""A rule that cannot be converted."""


def run_nft(commands: str, *flags: str) -> str:
    done = subprocess.run(
        ["nft", *flags, "-f", "-"], input=commands, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed() -> Entries:
    """The content of both tables as `nft` lists it."""
    found: Entries = {}
    for of in Family:
        done = subprocess.run(
            ["nft", "-y", "-T", "list", "table", nft_family(of), TABLE],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        found |= parse(done.stdout, of)
    return found


def bring(plane: NftablesBackend, wanted: Entries) -> dict[Key, KernelError]:
    return dict(plane.apply(diff(plane.read(), wanted)))


def entries(plane: NftablesBackend, *plans: ServicePortPlan, node: NodePlan | None = None) -> Entries:
    return plane.render(plans, node or NodePlan())


def service_chain(of: Entries, name: str) -> Chain:
    """The Service's chain for policy Cluster."""
    chains = (key for key in of if isinstance(key, Chain))
    return next(key for key in chains if re.match(f"service-.*/{name}/", key.name))


def spoil(wanted: Entries, name: str, rule: Rule = NOWHERE) -> Chain:
    """Add a rule to this Service's chain that the kernel rejects."""
    service = service_chain(wanted, name)
    chain = wanted[service]
    assert isinstance(chain, ChainEntry)
    wanted[service] = chain._replace(rules=(*chain.rules, rule))
    return service


def leading(plane: NftablesBackend, of: ServicePortPlan) -> set[Key]:
    """The Service's chain, and the elements that refer to it."""
    return {
        key
        for key in plane.render((of,), None)
        if isinstance(key, Chain) or (isinstance(key, Element) and key.container != "cluster-ips")
    }
