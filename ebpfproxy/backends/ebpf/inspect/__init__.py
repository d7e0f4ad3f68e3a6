"""Reads the contents of the pinned maps for `dump` and metrics. It writes nothing.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. cli/dump.py
imports tables.py. Read tables.py first.
"""
