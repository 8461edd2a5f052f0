"""The records of a run as an HTML page, pictures, a trace, and tables for the terminal.

build.py         from the folder of a run, or a cost file, to all of these
load.py          reads the folder of a run
findings.py      what a run showed, in words and rows
html.py          the report as one page
charts.py        the loss and step times as SVG
plots.py         the picture of one step, before and after
panels.py        one panel of it: compute lane and links between two times
short_spans.py   spans too short to see, merged so that pictures stay small and true
theme.py         colours of every picture, light and dark
heatmap.py       a picture of overlap effectiveness
chrome.py        timelines as a Chrome trace
tables.py        a comparison and a step's collectives as lines of text
cost_tables.py   a cost table as text
plan_figures.py  what a plan is predicted to give
plan_tables.py   that as text and as JSON
plan_picture.py  that as a picture
pipeline_build.py    schedules of a pipeline compared, or one read, verified, written and drawn
pipeline_tables.py   their times, bubbles and memory by simulation
pipeline_picture.py  one of them as a picture
stage_tables.py      the plan of a pipeline: its ranks, and schedules on one model
simulation_tables.py  a step simulated on a cluster as text, as JSON and as a Chrome trace
strategy_tables.py   layouts of a job on a cluster, the best first, and what each technique gives
searched_build.py    a pipeline searched for a model, beside the schedules of the package
"""
