"""The rules of Kubernetes: what this node must do for each Service, the same for every backend.

Every rule about which client reaches which endpoint is applied in this package, and only here. All functions
are pure: they read no clock, no file and no kernel state, and they do not depend on the backend.

- `service_plan.py`: the result types, `ServicePortPlan` and `NodePlan`, and the options in `PlanContext`.
- `frontends.py`: `plan_service`, which plans one Service: its frontends and loadBalancerSourceRanges.
- `traffic_policy.py`: internalTrafficPolicy and externalTrafficPolicy: scope and masquerading by client.
- `endpoints.py`: which endpoints each scope has: readiness, topology hints, terminating endpoints.
- `endpoint_reasons.py`, `reason.py`: why an endpoint is used or excluded, recorded on request.
- `direct_return.py`: tunnels to the nodes of endpoints (direct server return).
- `claims.py`: which ServicePort gets a frontend that several of them claim.
- `health_check_node_port.py`: the answer to load balancers at healthCheckNodePort.
- `node_checks.py`, `vips.py`: for an edge: nodes that are down, and the addresses to announce.
- `node_plan.py`: `plan_node`, which plans what all Services share.
- `node_ports.py`: the addresses of this node, and those that accept NodePorts (--nodeport-addresses).
- `devices.py`: the network devices that get programs, and their roles.
- `foreign_addresses.py`: addresses of frontends that may be another machine's.
- `local_traffic.py`: how packets of pods are recognized (--detect-local-mode).
- `counts.py`: counts over all Services: the size of the cluster, Services without local endpoints.
- `stale_flows.py`: which conntrack entries of UDP flows are stale.

`config` and the layers above it may import this package: `backends`, `http`, `api`, `agent`, `lab`, `bench`
and `cli`. `linux`, `model`, `log` and `errors` may not. This package imports only `model`.

Read first: `service_plan.py`, then `frontends.py`.
"""
