"""The flows of the packet path: their layout, state and timeouts, and the thread that removes old ones.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. Read state.py
first, then sweep.py.
"""
