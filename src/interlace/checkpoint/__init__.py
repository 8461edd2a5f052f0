"""Checkpoint folders on disk: written whole, checked, read on any mesh."""
