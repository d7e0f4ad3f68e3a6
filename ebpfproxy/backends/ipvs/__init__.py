"""The IPVS backend: the kernel's own load balancer, with the ipsets and few rules of kube-proxy's mode."""
