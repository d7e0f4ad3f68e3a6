"""Network namespaces."""
