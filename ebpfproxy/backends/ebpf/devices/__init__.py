"""Devices that have our programs."""
