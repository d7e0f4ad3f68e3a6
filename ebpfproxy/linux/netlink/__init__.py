"""rtnetlink, generic netlink and conntrack."""
