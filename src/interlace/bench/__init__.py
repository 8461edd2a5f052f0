"""Measured claims, one file each, found by name: `interlace bench NAME`.

A bench runs baseline and ours interleaved in one run and reports rows
{"case", "metric", "ours", "baseline", "ratio", "spread": [min, max]}.
"""
