"""The tables of the calling thread's network namespace, through the backend and through `nft`."""

import re
import subprocess

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, Chain, ChainEntry, Element, Entry, Key, nft_family
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan
from tests.support.nft_listing import parse

Entries = dict[Key, Entry]


def run_nft(commands: str) -> str:
    done = subprocess.run(
        ["nft", "-f", "-"], input=commands, capture_output=True, text=True, check=False, timeout=60
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


def endpoint_chain(of: Entries, name: str) -> Chain:
    """The chain of the first endpoint of this Service, which has session affinity."""
    chains = (key for key in of if isinstance(key, Chain))
    return next(key for key in chains if re.match(f"endpoint-.*/{name}/", key.name))


def service_chain(of: Entries, name: str) -> Chain:
    """The Service's chain for policy Cluster."""
    chains = (key for key in of if isinstance(key, Chain))
    return next(key for key in chains if re.match(f"service-.*/{name}/", key.name))


def spoil(wanted: Entries, name: str, rule: str = "goto nowhere") -> Chain:
    """Add a rule to this Service's chain that the kernel rejects."""
    service = service_chain(wanted, name)
    chain = wanted[service]
    assert isinstance(chain, ChainEntry)
    wanted[service] = chain._replace(rules=(*chain.rules, rule))
    return service


def leading(plane: NftablesBackend, of: ServicePortPlan) -> set[Key]:
    """The entries of the Service's endpoints, and those that refer to them."""
    shared = ("cluster-ips", "hairpin-connections")
    return {
        key for key in plane.render((of,), None) if not (isinstance(key, Element) and key.container in shared)
    }
