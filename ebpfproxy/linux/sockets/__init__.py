"""Sockets of this node: listing and destroying them, and reconnecting those of other processes.

- sockets.py: lists and destroys sockets (sock_diag)
- holders.py: finds the processes that hold them
- duplicates.py: duplicates their descriptors, and connects the sockets to another address

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read sockets.py first.
"""
