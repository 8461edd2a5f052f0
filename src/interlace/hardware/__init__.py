"""Descriptions of machines, and the times computed from them. Torch-free."""
