"""The agent's HTTP servers: health checks for the kubelet and load balancers, metrics for Prometheus.

- `server.py`: the HTTP server on which the others are built.
- `connections.py`: the limits of connections in number and time.
- `healthz.py`: /healthz, /livez and /readyz on port 10256.
- `health_check_node_port.py`: the healthCheckNodePorts of Services.
- `node_checker.py`: the client that checks nodes for an edge.
- `metrics.py`: /metrics, /proxyMode and /healthz on port 10249, and the metrics that the agent updates.
- `scrape.py`: the metrics that are read at each scrape. `rest_client_metrics.py`: requests to the API server.
  `component_metrics.py`: version, feature gates and health checks.
- `zpages.py`: /configz, /flagz, /statusz and /debug/flags/v on port 10249.

The servers run in their own threads and take no decisions. The control thread replaces the values that they
show; a value is immutable or replaced as a unit, so no locks are needed.

`agent`, `lab`, `bench` and `cli` may import this package; `backends` and `api` may not. This package may
import `config` and the layers below it: `plan`, `linux`, `model`, `log` and `errors`. prometheus_client is
imported only in this package.

Read first: `server.py`, then `healthz.py`.
"""
