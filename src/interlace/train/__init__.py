"""Training: data, weights, optimizer, the loop, metrics."""
