"""Pinned maps, and moving their contents to another version."""
