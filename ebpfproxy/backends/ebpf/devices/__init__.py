"""The devices that the classifiers are attached to: attachments, their position, and checks of both.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. Read
filters.py first, then positions.py.
"""
