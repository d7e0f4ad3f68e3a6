"""Generates broken Services, EndpointSlices and Nodes for fuzzing `parse` and all code after it.

Each starts as a valid object, with few different names and addresses so that objects refer to each other. It
is then damaged a few times at random positions: a value of another type or out of range, a missing or
duplicate value, unusual text. One in eight is also damaged as bytes. About half of all remain usable.
"""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    65535,
    65536,
    2**31,
    2**63,
    2**64 - 1,
    1.5,
    -0.0,
    1e308,
    "",
    " ",
    "None",
    "Local",
    "SCTP",
    "QUIC",
    "FQDN",
    "IPv6",
    "ExternalName",
    "ClientIP",
    "LoadBalancer",
    "\x00",
    "a\nb",
    'q"\\',
    "-A INPUT -j ACCEPT",
    "ünï☃",
    "x" * 300,
    "0.0.0.0",
    "::",
    "10.0.0.010",
    " 10.0.0.1 ",
    "10.0.0.1/8",
    "300.1.1.1",
    "::ffff:10.0.0.1",
    "fe80::1%eth0",
    "fd00::1",
    "0/0",
    "::/0",
    "2024-05-01T10:00:00.999999999Z",
    "2024-13-45T99:00:00Z",
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": None},
    [{"name": 1}, "a", None],
)
"""Replacement values: JSON of every type, limits of ranges, texts with a meaning."""


def _service(pick: random.Random) -> Any:
    number = pick.randrange(50)
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"name": f"svc-{number}", "namespace": "default", "labels": {"app": "web"}},
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": f"10.96.0.{number + 1}",
            "clusterIPs": [f"10.96.0.{number + 1}", f"fd00:96::{number + 1:x}"],
            "ipFamilies": ["IPv4", "IPv6"],
            "externalIPs": ["192.0.2.1", "2001:db8::1"],
            "ports": [
                {
                    "name": "http",
                    "protocol": "TCP",
                    "port": 80,
                    "nodePort": 30000 + number,
                    "targetPort": 8080,
                },
                {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 31000 + number},
            ],
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
            "loadBalancerSourceRanges": ["198.51.100.0/24", "2001:db8:1::/48"],
            "internalTrafficPolicy": "Cluster",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 32000 + number,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7", "ipMode": "VIP"}, {"hostname": "x"}]}},
    }


def _slice(pick: random.Random) -> Any:
    number, last = pick.randrange(50), pick.randrange(250)
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": f"svc-{number}-{last % 3}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": f"svc-{number}"},
            "annotations": {
                "endpoints.kubernetes.io/last-change-trigger-time": "2024-05-01T10:00:00.123456789Z"
            },
        },
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "protocol": "TCP", "port": 8080},
            {"name": "dns", "protocol": "UDP", "port": 53},
        ],
        "endpoints": [
            {
                "addresses": [f"10.244.0.{last}"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": "here",
                "hints": {"forZones": [{"name": "zone-a"}], "forNodes": [{"name": "here"}]},
            },
            {"addresses": ["10.244.1.1"], "conditions": {"ready": False}, "nodeName": "elsewhere"},
        ],
    }


def _node(pick: random.Random) -> Any:
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": "here", "labels": {"topology.kubernetes.io/zone": f"zone-{pick.randrange(2)}"}},
        "spec": {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]},
    }


_MAKERS: dict[str, Callable[[random.Random], Any]] = {
    "Service": _service,
    "EndpointSlice": _slice,
    "Node": _node,
}
_KINDS = ("Service", "EndpointSlice", "Service", "EndpointSlice", "EndpointSlice", "Node")


def junk_objects(seed: int, n: int) -> Iterator[tuple[str, bytes]]:
    """`n` pairs of kind (Service, EndpointSlice or Node) and bytes; the same for the same seed."""
    pick = random.Random(seed)
    encode = msgspec.json.Encoder().encode
    for _ in range(n):
        kind = _KINDS[int(pick.random() * 6)]
        value = _MAKERS[kind](pick)
        for _ in range(int(pick.random() * 4)):
            damage_value(value, pick)
        raw = encode(value)
        yield kind, damage_bytes(raw, pick) if pick.random() < 0.125 else raw


def damage_value(value: Any, pick: random.Random) -> None:
    """Change one random position of a JSON object or list in position."""
    while True:
        positions = list(value) if isinstance(value, dict) else range(len(value))
        if not positions:
            return
        position = positions[int(pick.random() * len(positions))]
        inner = value[position]
        if not inner or not isinstance(inner, dict | list) or pick.random() < 0.1:
            break
        value = inner
    choice = pick.random()
    if choice < 0.7:
        value[position] = copy.deepcopy(_VALUES[int(pick.random() * len(_VALUES))])
    elif choice < 0.85:
        del value[position]
    elif isinstance(value, list):
        value.append(inner)
    else:
        value[pick.choice(("name", "port", "labels", "items", "unknown"))] = inner


def damage_bytes(raw: bytes, pick: random.Random) -> bytes:
    """Truncate, overwrite or insert at one random position."""
    at = int(pick.random() * len(raw))
    choice = int(pick.random() * 7)
    if choice == 0:
        return raw[:at]
    if choice == 1:
        return raw[:at] + bytes((int(pick.random() * 256),)) + raw[at + 1 :]
    return raw[:at] + _INSERTS[choice - 2] + raw[at:]


_INSERTS = (b"\xff\xfe", b"\\ud800", b"[" * 3000, b"9" * 5000, b"\x00")
