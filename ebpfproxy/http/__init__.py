"""The HTTP servers: health for load balancers and the kubelet, metrics for Prometheus.

Their threads only read; the control thread gives them what they show, as whole values. Nothing
here decides anything about the cluster, and only this package speaks Prometheus.
"""
