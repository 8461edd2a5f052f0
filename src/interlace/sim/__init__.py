"""Simulation: what a plan would do, as the Timeline type that real runs give too."""
