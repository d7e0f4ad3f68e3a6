"""``ebpfproxy doctor``: what this node lacks, which other programs it has, and what to do.

- `check`: one row of the report; `links`: the page of the documentation about it.
- `modes`: what each mode needs.
- `traces`, `cni_files`: what is read from the node: CNI configuration, devices, chains, tables, programs,
  processes.
- `plugins`: the network plugins in these traces; `plugin_settings`: what to set for them.
- `other_proxies`: kube-proxy and other programs that translate Services.
- `remedies`: the actions of ``--fix``.
- `report`: all of it.

Only `remedies` changes the node. `cli` may import this package.

Read first: `report.py`.
"""
