"""The iptables backend: the chains and rules that kube-proxy writes, for both backends of the tool."""
