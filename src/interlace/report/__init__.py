"""Reports of a run: an HTML page, a picture of one step, a trace, tables for the terminal."""
