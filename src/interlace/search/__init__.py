"""Searches: a graph and costs in, an issue order out. Torch-free."""
