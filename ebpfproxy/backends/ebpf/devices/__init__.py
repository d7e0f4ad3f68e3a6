"""Network devices: attaching the classifiers to them, and checks of the attachments.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. Read
filters.py first, then positions.py.
"""
