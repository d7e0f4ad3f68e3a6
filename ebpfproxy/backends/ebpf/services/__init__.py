"""The maps that hold Services: reading them back, and applying changes step by step.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. Read table.py
first: it documents the order of the steps.
"""
