"""Reports of a run: an HTML page, a picture of one step, a Chrome trace, tables for the terminal."""
