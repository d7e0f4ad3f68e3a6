"""bpf(2), the compiler, and attaching programs: to cgroups, as tc filters, by tcx links.

It is independent of Services and of the maps of ebpfproxy. It may import linux, model, log and errors. config
and the layers above it may import it. See [tool.importlinter] in pyproject.toml. Read bpf.py first.
"""
