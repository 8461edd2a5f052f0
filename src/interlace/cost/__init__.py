"""Where a CostTable comes from: measured on this machine, or computed from a model of one."""
