"""The tables of the network namespace that the calling thread is in, by the backend and by `nft`."""

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
    """What nft itself finds in both tables."""
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
    """That of the first endpoint of this Service, which has session affinity."""
    chains = (key for key in of if isinstance(key, Chain))
    return next(key for key in chains if re.match(f"endpoint-.*/{name}/", key.name))


def service_chain(of: Entries, name: str) -> Chain:
    """The one of policy Cluster."""
    chains = (key for key in of if isinstance(key, Chain))
    return next(key for key in chains if re.match(f"service-.*/{name}/", key.name))


def spoil(wanted: Entries, name: str, rule: str = "goto nowhere") -> Chain:
    """Have this Service's chain do what is rejected."""
    service = service_chain(wanted, name)
    chain = wanted[service]
    assert isinstance(chain, ChainEntry)
    wanted[service] = chain._replace(rules=(*chain.rules, rule))
    return service


def leading(plane: NftablesBackend, of: ServicePortPlan) -> set[Key]:
    """The entries that lead to its endpoints, and their own."""
    shared = ("cluster-ips", "hairpin-connections")
    return {
        key for key in plane.render((of,), None) if not (isinstance(key, Element) and key.container in shared)
    }
