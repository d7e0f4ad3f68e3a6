"""The service maps."""
