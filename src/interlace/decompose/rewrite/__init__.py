"""Decomposed collectives as a pass over traced graphs."""
