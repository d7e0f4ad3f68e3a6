"""Pinned maps across versions: their shapes, new maps with the previous contents, and map migration.

Only backends/ebpf and the layers above backends (see backends/ebpf/__init__.py) may import it. Read
map_shapes.py first. Then read map_pins.py (before programs are replaced) and migrate.py (meanwhile).
"""
