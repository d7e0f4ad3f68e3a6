"""The page /rebalancing: the endpoints that get no new connections for now, since they have their share.

Only the agent knows them (`ClusterState.full`). Commands that compare the kernel with the plan read the page.
"""

import json
from typing import Any

from ebpfproxy.model.address import Address, Family, Protocol, format_endpoint, parse_endpoint
from ebpfproxy.model.cluster import Full
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.planned_endpoints import target_of

PATH = "/rebalancing"
_PORT = slice(16, 18)


def encode(full: Full) -> bytes:
    """Return the page as JSON."""
    services = [
        {
            "namespace": service.namespace,
            "name": service.name,
            "port": service.port,
            "protocol": service.protocol.name,
            "family": family.value,
            "fullEndpoints": [_shown(each) for each in sorted(targets)],
        }
        for (service, family), targets in sorted(
            full.items(), key=lambda item: (item[0][0], item[0][1].value)
        )
    ]
    return json.dumps({"services": services}).encode()


def decode(text: str) -> Full:
    """Return the content of the page. Empty for a text that is none, such as that of an older agent."""
    try:
        return dict(map(_entry, json.loads(text)["services"]))
    except (ValueError, KeyError, TypeError):
        return {}


def _entry(of: dict[str, Any]) -> tuple[tuple[ServicePortName, Family], frozenset[bytes]]:
    service = ServicePortName(of["namespace"], of["name"], of["port"], Protocol[of["protocol"]])
    return (service, Family(of["family"])), frozenset(
        target_of(*parse_endpoint(each)) for each in of["fullEndpoints"]
    )


def _shown(target: bytes) -> str:
    return format_endpoint(Address(target[:16]), int.from_bytes(target[_PORT]))
