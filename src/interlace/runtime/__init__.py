"""Running plans on real processes: executor, recorder, gradients, measurements."""
