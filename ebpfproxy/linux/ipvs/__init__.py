"""IPVS by generic netlink."""
