"""Fault injection: every kernel call of a mode can fail, and the process can be killed at any of them.

- injector.py, points.py: the faults, and the calls that they replace
- clusters.py, lives.py, testbed.py: random states, one process that syncs them, a node with clients
- test_kernel_faults.py, test_api_faults.py: the tests

`make faults` runs the long form. `--faults-seed` repeats a run.
"""
