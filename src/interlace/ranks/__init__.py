"""Processes that are the ranks of a job: started, kept together, watched, ended, and compared."""
