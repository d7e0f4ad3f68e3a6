"""What the modes that use the kernel's NAT share: nftables, iptables and ipvs.

- `nat_backend`: the base class of their backends, which uses the other modules.
- `node_support`: whether the kernel tracks SCTP, and the address families that a node uses.
- `sysctls`: sysctls of conntrack and route_localnet.
- `stale_conntrack`: a thread that ends stale UDP flows.

The backends of these modes import this package. It imports `backends.interface`, `config`, `plan`, `linux`,
`model`, `log` and `errors`, but no package of a mode. See [tool.importlinter] in pyproject.toml.

Read first: `nat_backend.py`.
"""
