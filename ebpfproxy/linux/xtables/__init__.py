"""iptables through its own tools, of both iptables backends (legacy and nft).

- iptables.py: runs iptables-save, iptables-restore and iptables
- legacy.py: what the kernel reports about the tables of iptables-legacy, and its lock file

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read iptables.py first.
"""
