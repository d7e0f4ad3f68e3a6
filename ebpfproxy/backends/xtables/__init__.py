"""Tables of iptables as entries, which the modes iptables and ipvs read and change by deltas.

- `entries`, `layout`: the keys and entries, and which chains and rules belong to a mode.
- `names`, `rule_text`: names of chains, and parts of the text of a rule.
- `families`: the tables of both address families, which a backend keeps open.
- `tables`, `saved`, `script`: one family; what iptables-save prints; what iptables-restore reads.
- `rejections`: finds the entries that the kernel or the tool rejects.
- `legacy_edits`: detects changes by other programs in iptables-legacy.
- `tool_backends`, `probing`, `cleanup`: the choice between legacy and nft, probes, and the removal of chains.

Each backend defines its chains with a `Layout`. The backends iptables and ipvs import this package. It
imports `backends.interface`, `backends.delta`, `backends.generation`, `backends.findings`, `plan`, `linux`,
`model`, `log` and `errors`, but no package of a mode. See [tool.importlinter] in pyproject.toml.

Read first: `entries.py`, then `families.py`.
"""
