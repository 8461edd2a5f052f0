"""Shipped run files, found by name: `interlace train demo`."""
