"""The backend of mode nftables: the tables `ip kube-proxy` and `ip6 kube-proxy`, with the layout of
kube-proxy.

- `mode`, `probes`, `coexistence`, `settings`: the mode definition, its probes, checks of the node's nft and
  of other NAT, its settings.
- `backend`: the `Backend`. It uses `table` (one table of the kernel).
- `entries`, `names`: the keys and entries, and the names of a Service's objects.
- `node_objects`, `service_objects`, `flowtable_objects`, `port_ranges`: convert plans into entries. Pure.
- `localhost_node_ports`, `localhost_relay`: NodePorts on loopback: their entries, and the relay process.
- `changes`, `commit`: convert entries into operations in their order, and commit what the kernel accepts.
- `reading`: reads a table as entries. `inspection`: for readers in any process.
- `cleanup`: removes what the mode or kube-proxy left.

`backends.selection` imports `mode`. No other package of a mode may import this one. It imports
`backends.userspace` for the relay, `backends.netfilter`, the shared modules of `backends`, `config`, `plan`,
`linux`, `model`, `log` and `errors`. See [tool.importlinter] in pyproject.toml.

Read first: `entries.py`, then `table.py`.
"""
