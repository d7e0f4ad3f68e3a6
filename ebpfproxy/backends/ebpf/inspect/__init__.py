"""What the pinned maps contain, for `dump` and metrics."""
