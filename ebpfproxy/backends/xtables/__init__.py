"""iptables of either backend, for the dataplanes that have rules: tables as entries, changed by deltas.

Whose chains they are, and what is in them, is each dataplane's own: it says so with a `Layout`.
"""
