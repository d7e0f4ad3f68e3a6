"""Sockets that the hooks have redirected: finding, reconnecting and translating stale ones.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. Read
stale_sockets.py first, then peers.py.
"""
