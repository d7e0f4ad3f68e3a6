"""Linux kernel interfaces: one module per interface, thin and without policy.

Each function does one system call or one netlink exchange, and converts its errno to an error of
`ebpfproxy.errors`. Packages: `bpf`, `ipvs`, `netlink`, `netns`, `nft`, `sockets` and `xtables`.
Modules: `capabilities`, `inotify`, `ipset`, `locks`, `modules`, `mounts`, `processes`, `sysctl` and
`tools`.

`config` and the layers above it may import this package: `backends`, `http`, `api`, `agent`, `lab`, `bench`
and `cli`. `plan`, `model`, `log` and `errors` may not. This package imports only `model`, `log` and `errors`.
bcc and pyroute2 are imported only in this package. Processes are started only in this package, `lab` and
`bench`.

Read first: `sysctl.py`, the shortest example of the pattern; then `netlink/netlink.py`, on which most
packages depend.
"""
