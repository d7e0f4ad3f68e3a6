"""iptables of either backend, for the backends that have rules: tables as entries, changed by deltas.

Whose chains they are, and what is in them, is each backend's own: it says so with a `Layout`.
"""
