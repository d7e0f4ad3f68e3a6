"""Backends: one package for each kernel mechanism, all behind one interface.

- `ebpf`, `nftables`, `iptables`, `ipvs` and `userspace`: one package for each mode. Each contains the mode's
  definition, its cleanup and its inspection.
- `netfilter`: what the modes that use the kernel's NAT share (nftables, iptables, ipvs).
- `interface`: what a mode and its backend are to the agent and to readers.
- `delta`, `generation`, `findings`: the comparison of entries, the detection of changes by other programs,
  the result of a probe.
- `selection`: the choice of the mode.
- `uplink_checks`, `firewall_checks`, `bridge_checks`: what `ebpfproxy doctor` checks beside the modes.

`agent`, `lab`, `bench` and `cli` may import this package. It imports `config`, `plan`, `linux`, `model`,
`log` and `errors`. Backends do not import each other, except `ipvs`, which writes its rules with `iptables`.
No backend handles an API object. See [tool.importlinter] in pyproject.toml.

Read first: `interface.py`.
"""
