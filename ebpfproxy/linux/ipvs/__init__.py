"""IPVS through generic netlink: virtual servers, real servers and timeouts.

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read ipvs.py first; messages.py has the message formats.
"""
