"""The proxy modes: what of a dataplane's package concerns a node that may have any of them.

One file for each mode, and which of them is taken. This is the only place that knows all dataplanes.
"""
