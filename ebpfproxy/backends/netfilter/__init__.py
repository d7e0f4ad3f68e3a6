"""What the modes that use the kernel's NAT (nftables, iptables, ipvs) share."""
