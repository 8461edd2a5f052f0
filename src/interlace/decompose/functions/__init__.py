"""Decomposed collectives as functions on plain tensors, with autograd."""
