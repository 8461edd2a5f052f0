"""Interlace hides communication in distributed LLM training.

Importing this package does nothing; each sub-package says in its docstring what it is for.
"""

__version__ = "0.1.0"
