"""The nftables backend: tables `ip kube-proxy` and `ip6 kube-proxy`, laid out as kube-proxy's own."""
