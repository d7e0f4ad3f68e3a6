"""Immutable values: what the API server and the kernel reported.

Nothing in this package reads a file, a socket or the kernel, or applies a rule of Kubernetes. Objects of the
API: `service`, `endpoint`, `node`; all of them at one moment: `cluster`. Reports of the kernel: `device` and
`counters`. `address` is the type of every IP address.

Every package may import this package, except `log` and `errors`. This package imports only the standard
library.

Read first: `address.py`, which every package uses; then `cluster.py`, the input of `plan`.
"""
