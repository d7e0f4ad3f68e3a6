"""bpf(2), the compiler, and attaching programs: to cgroups, as tc filters, by tcx links.

It knows no Services and no maps of ebpfproxy. linux/ may import only linux, model, log and errors; all layers
above linux may import it. See [tool.importlinter] in pyproject.toml. Read bpf.py first.
"""
