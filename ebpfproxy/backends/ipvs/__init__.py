"""The backend of mode ipvs: the kernel's load balancer with the ipsets and rules of kube-proxy's mode ipvs.

- `mode`, `probes`, `prerequisites`, `settings`: the mode definition, its probes, the scheduler and sysctls
  that it requires, its settings.
- `backend`: the `Backend`. It uses `servers` (virtual servers), `addresses` (kube-ipvs0), `ip_sets` and
  `iptables.families`.
- `entries`, `sets`, `layout`: the keys and entries, the ipsets, and the chains that belong to the mode.
- `node_entries`, `service_entries`: convert plans into entries. `node_port_expansion` and `ownership` relate
  entries to kernel objects. All are pure.
- `cleanup`: removes what the mode or kube-proxy left.

`backends.selection` imports `mode`. No other package of a mode may import this one. It imports
`backends.iptables`, `backends.netfilter`, the shared modules of `backends`, `config`, `plan`, `linux`,
`model`, `log` and `errors`. See [tool.importlinter] in pyproject.toml.

Read first: `entries.py`, then `backend.py`.
"""
