"""The backend of mode ipvs: the kernel's load balancer with the ipsets and rules of kube-proxy's mode ipvs.

- `mode`, `prerequisites`: the mode definition, its probes, the scheduler and sysctls that it requires.
- `backend`: the `Backend`. It uses `servers` (virtual servers), `addresses` (kube-ipvs0), `sets` and
  `iptables.families`.
- `entries`: the settings, the keys and entries, and the chains that belong to the mode.
- `node_entries`, `service_entries`: convert plans into entries. `node_port_expansion` relates them to kernel
  objects. All are pure.
- `forwarding`: the choice of the forwarding method. `endpoint_networks` and `return_path` prepare endpoints
  and the node for untranslated packets.
- `cleanup`: removes what the mode or kube-proxy left.

`backends.selection` imports `mode`. No other package of a mode may import this one. It imports
`backends.iptables`, `backends.netfilter`, the shared modules of `backends`, `config`, `plan`, `linux`,
`model`, `log` and `errors`. See [tool.importlinter] in pyproject.toml.

Read first: `entries.py`, then `backend.py`.
"""
