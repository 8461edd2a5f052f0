"""The command line: thin. Parse, call one function, print.

A file per command, and what they share:

app.py           the commands, what they say and how they end
train.py         `interlace train`
plan_command.py  `interlace plan`
strategy_command.py  `interlace plan --global-batch`
simulate_command.py  `interlace simulate`
profile.py       `interlace profile`
report.py        `interlace report`
schedule.py      `interlace schedule`
bench.py         `interlace bench`
lab.py           `interlace lab`
export.py        `interlace export`
explain.py       `interlace explain`
help_panels.py   help in a panel for each table of the run file
options.py       options of several commands, their plain words, and flags on top of a run file
before_start.py  what is refused before any rank starts: missing files, too large a model
run_file.py      run files: TOML to RunConfig, strictly, and back
ranks.py         commands that run as ranks: of the job around us, or started here
"""
