"""ipset through netlink: sets of addresses and ports, and their members.

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read ipset.py first; messages.py has the message formats.
"""
