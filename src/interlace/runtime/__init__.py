"""Running plans on real processes: executor, recorder, agreement, watchdog, local launch."""
