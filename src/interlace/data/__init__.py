"""From data files to batches of tokens."""
