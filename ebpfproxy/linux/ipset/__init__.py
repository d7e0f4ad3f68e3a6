"""ipset by netlink."""
