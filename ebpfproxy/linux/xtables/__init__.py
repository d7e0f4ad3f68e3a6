"""iptables by its own tools."""
