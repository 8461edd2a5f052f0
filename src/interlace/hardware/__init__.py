"""Descriptions of machines and clusters, and the times that follow from them. Torch-free."""
