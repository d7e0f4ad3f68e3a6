"""The HTTP servers: health for load balancers and the kubelet, metrics for Prometheus.

Their threads only read; what they show is told to them by the control thread, as whole values. Nothing
here decides anything about the cluster, and only this package speaks Prometheus.
"""
