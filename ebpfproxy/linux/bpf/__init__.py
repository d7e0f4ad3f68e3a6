"""bpf(2) and where programs are attached: cgroups, tc filters, tcx links."""
