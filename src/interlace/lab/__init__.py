"""Slow links without a cluster: shaped network namespaces, and links emulated in user space."""
