"""The flow maps."""
