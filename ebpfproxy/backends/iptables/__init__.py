"""The backend of mode iptables: writes the chains and rules of kube-proxy, for iptables-legacy and
iptables-nft. Mode ipvs writes its rules with the same modules.

- `mode`, `backend`: the mode definition and the `Backend`.
- `entries`, `chains`: the keys and entries, which chains and rules belong to a mode, and what iptables-save
  prints.
- `rules`, `service_rules`: convert plans into entries. Pure.
- `families`, `tables`, `script`: the tables of both families, which a backend keeps open; one family; what
  iptables-restore reads.
- `packet_counters`: the counters that rules increase.
- `probes`, `cleanup`: the choice between legacy and nft, probes, and the removal of chains.

`backends.selection` imports `mode`, and `backends.ipvs` what it needs. This package imports
`backends.netfilter`, the shared modules of `backends`, `config`, `plan`, `linux`, `model`, `log` and
`errors`. See [tool.importlinter] in pyproject.toml.

Read first: `entries.py`, then `service_rules.py`.
"""
