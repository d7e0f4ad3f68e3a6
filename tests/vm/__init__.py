"""The kernel tests on other kernels: each boots in a VM over this machine's root file system."""
