"""Builders of API objects (Service, EndpointSlice, Node, Pod), and a writer of manifest files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # without libyaml, PyYAML has no CSafeDumper


def port(
    number: int, *, name: str = "", protocol: str = "TCP", target: int = 0, node_port: int = 0
) -> Object:
    """Return a port of a Service. `target` is informational, because a proxy reads the slice's port."""
    entry: Object = {"port": number, "protocol": protocol}
    if name:
        entry["name"] = name
    if target:
        entry["targetPort"] = target
    if node_port:
        entry["nodePort"] = node_port
    return entry


def service(
    name: str,
    cluster_ips: Sequence[str],
    ports: Sequence[Object],
    *,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Object:
    """Return a Service. `spec` is merged into its spec. Its type is NodePort if a port has a nodePort."""
    kind = "NodePort" if any("nodePort" in entry for entry in ports) else "ClusterIP"
    fields: Object = {
        "type": kind,
        "clusterIP": cluster_ips[0],
        "clusterIPs": list(cluster_ips),
        "ipFamilies": ["IPv6" if ":" in address else "IPv4" for address in cluster_ips],
        "ports": list(ports),
    }
    metadata: Object = {"name": name, "namespace": namespace}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": fields | spec}


def endpoint(address: str, *, node: str = "", zone: str = "", **conditions: bool) -> Object:
    """Return an endpoint of a slice. It is ready unless `conditions` (ready, serving, terminating) differ."""
    entry: Object = {"addresses": [address], "conditions": {"ready": True} | conditions}
    if node:
        entry["nodeName"] = node
    if zone:
        entry["zone"] = zone
    return entry


def endpoint_slice(
    name: str,
    service: str,
    endpoints: Sequence["str | Object"],
    ports: Sequence[Object],
    *,
    namespace: str = "default",
    family: str = "",
    annotations: dict[str, str] | None = None,
) -> Object:
    """Return a slice of a Service. A text among `endpoints` is the address of a ready endpoint.

    `ports` are those of `port`. `family` is IPv4 or IPv6; the default is that of the first endpoint.
    """
    entries = [endpoint(entry) if isinstance(entry, str) else entry for entry in endpoints]
    is_ipv6 = bool(entries) and ":" in entries[0]["addresses"][0]
    metadata: Object = {
        "name": name,
        "namespace": namespace,
        "labels": {"kubernetes.io/service-name": service},
    }
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": family or ("IPv6" if is_ipv6 else "IPv4"),
        "endpoints": entries,
        "ports": [{"name": "", "protocol": "TCP"} | entry for entry in ports],
    }


def node(
    name: str,
    addresses: Sequence[str] = (),
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    pod_cidrs: Sequence[str] = (),
) -> Object:
    metadata: Object = {"name": name, "labels": {"kubernetes.io/hostname": name} | dict(labels or {})}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "spec": {"podCIDRs": list(pod_cidrs)},
        "status": {"addresses": [{"type": "InternalIP", "address": address} for address in addresses]},
    }


def service_cidr(name: str, cidrs: Sequence[str]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": name},
        "spec": {"cidrs": list(cidrs)},
    }


def pod(name: str, node: str, addresses: Sequence[str], ports: Sequence[Object]) -> Object:
    """Return a running Pod with one container; `ports` are its containerPorts."""
    status: Object = {"phase": "Running", "podIPs": [{"ip": address} for address in addresses]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": node, "containers": [{"name": "main", "ports": list(ports)}]},
        "status": status,
    }


def listed(objects: Iterable[Object]) -> Object:
    """Return a List of the objects."""
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


def write(path: Path, *objects: Object) -> None:
    """Write the objects to a file, YAML or JSON by its suffix, and replace it atomically.

    A JSON file takes one object: see `listed`.
    """
    if path.suffix == ".json":
        (only,) = objects
        text = json.dumps(only, separators=(",", ":"))
    else:
        text = yaml.dump_all(objects, Dumper=_DUMPER, sort_keys=False)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
