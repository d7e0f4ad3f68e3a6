"""nf_tables by netlink: messages, expressions, rules as text."""
