"""Times measured on this machine: of operators alone, in pairs, and of sites in slices."""
