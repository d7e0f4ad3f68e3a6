"""Services and EndpointSlices as the API writes them, and folders of them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


def port(
    number: int, *, name: str = "", protocol: str = "TCP", target: int = 0, node_port: int = 0
) -> Object:
    """One of a Service's ports; `target` is only for readers, since a proxy reads the slice's port."""
    entry: Object = {"port": number, "protocol": protocol}
    if name:
        entry["name"] = name
    if target:
        entry["targetPort"] = target
    if node_port:
        entry["nodePort"] = node_port
    return entry


def service(
    name: str, cluster_ips: Sequence[str], ports: Sequence[Object], *, namespace: str = "default", **spec: Any
) -> Object:
    """A Service; `spec` is merged into its spec, and type is NodePort where a port has a nodePort."""
    kind = "NodePort" if any("nodePort" in entry for entry in ports) else "ClusterIP"
    fields: Object = {
        "type": kind,
        "clusterIP": cluster_ips[0],
        "clusterIPs": list(cluster_ips),
        "ipFamilies": ["IPv6" if ":" in address else "IPv4" for address in cluster_ips],
        "ports": list(ports),
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": fields | spec}


def endpoint(address: str, *, node: str = "", zone: str = "", **conditions: bool) -> Object:
    """One of a slice's endpoints, ready unless `conditions` (ready, serving, terminating) says otherwise."""
    entry: Object = {"addresses": [address], "conditions": {"ready": True} | conditions}
    if node:
        entry["nodeName"] = node
    if zone:
        entry["zone"] = zone
    return entry


def endpoint_slice(
    name: str,
    of: str,
    endpoints: Sequence["str | Object"],
    ports: Sequence[Object],
    *,
    namespace: str = "default",
    family: str = "",
    annotations: dict[str, str] | None = None,
) -> Object:
    """A slice of the Service `of`. A text among `endpoints` is the address of one that is ready.

    `ports` as `port` makes them. `family` is IPv4 or IPv6; by default that of the first endpoint.
    """
    entries = [endpoint(entry) if isinstance(entry, str) else entry for entry in endpoints]
    six = bool(entries) and ":" in entries[0]["addresses"][0]
    metadata: Object = {
        "name": name,
        "namespace": namespace,
        "labels": {"kubernetes.io/service-name": of},
    }
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": family or ("IPv6" if six else "IPv4"),
        "endpoints": entries,
        "ports": [{"name": "", "protocol": "TCP"} | entry for entry in ports],
    }


def node(name: str, addresses: Sequence[str] = (), *, labels: dict[str, str] | None = None) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name} | (labels or {})},
        "status": {"addresses": [{"type": "InternalIP", "address": address} for address in addresses]},
    }


def listed(objects: Iterable[Object]) -> Object:
    """Many objects as one."""
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


def write(path: Path, *objects: Object) -> None:
    """Put the objects into one file, YAML or JSON by its name, replacing it in one step.

    JSON takes one object: see `listed`.
    """
    if path.suffix == ".json":
        (only,) = objects
        text = json.dumps(only, separators=(",", ":"))
    else:
        text = yaml.safe_dump_all(objects, sort_keys=False)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text)
    fresh.replace(path)
