"""bpf(2), compiling and loading programs, and attaching them: to cgroups, as tc filters, by tcx links.

- `bpf.py`: the system call: maps, programs and links as objects with a file descriptor.
- `compiler.py`: compiles C with bcc in a child process. The result is an object file (`object_file.py`). It
  is kept in a folder (`object_cache.py`). `loader.py` loads it into the kernel and pins the programs.
- `cgroup.py`, `tc.py`, `tcx.py`: attach programs; `tc_watch.py`: notifications of changed tc filters.
- `test_run.py`: runs a program with a packet.
- `grace_period.py`: waits for running programs.

It is independent of Services and of the maps of ebpfproxy. It may import linux, model, log and errors. config
and the layers above it may import it. See [tool.importlinter] in pyproject.toml. Read bpf.py first.
"""
