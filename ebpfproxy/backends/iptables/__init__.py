"""The backend of mode iptables: writes the chains and rules of kube-proxy, for iptables-legacy and
iptables-nft.

- `mode`, `probes`, `settings`: the mode definition, its probes, its settings.
- `backend`: the `Backend`, which uses `xtables.families`.
- `layout`: names of chains, and which chains and rules belong to the mode.
- `node_rules`, `service_rules`: convert plans into entries. Pure.
- `packet_counters`: the counters that rules increase.
- `cleanup`: removes what the mode or kube-proxy left.

`backends.selection` imports `mode`. No other package of a mode may import this one. It imports
`backends.xtables`, `backends.netfilter`, the shared modules of `backends`, `config`, `plan`, `linux`,
`model`, `log` and `errors`. See [tool.importlinter] in pyproject.toml.

Read first: `layout.py`, then `service_rules.py`.
"""
