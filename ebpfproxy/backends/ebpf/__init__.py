"""The eBPF dataplane: maps that the programs of bpf/ read, and the hooks that run those programs."""
