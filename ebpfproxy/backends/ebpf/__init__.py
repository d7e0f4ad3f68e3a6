"""The eBPF backend: fills the maps that the programs of bpf/ read, and attaches these programs to hooks.

- services/: the maps that hold Services
- devices/: the classifiers at network devices
- flows/: the flows of the packet path
- sockets/: sockets that the hooks have redirected
- migration/: maps across versions
- inspect/: the contents of the maps, for `dump` and metrics

It may import config, plan, linux, model and the shared modules of backends, but no other backend. The
layers above backends (agent, lab, bench, cli) may import it, and so may backends/selection and
backends/uplink_checks. Other backends may not. See [tool.importlinter] in pyproject.toml.

Read mode.py first, then backend.py and entries.py.
"""
