"""What a job spends on communication, and what hiding it could gain: from traces of torch.profiler
or one of our runs. No torch.

explanation.py         the whole way: sources in, figures and advice out
explain_text.py        that as text

event_stream.py        a trace file read event by event
kineto_events.py       the events that matter, the rest dropped
kineto_collectives.py  kind, process group and bytes of a collective
step_choice.py         which steps count
step_parts.py          forward, backward and micro-batch of each kernel
kineto_trace.py        these together: a file as what one rank did
run_trace.py           a run's recorded steps as what its ranks did
rank_trace.py          what one rank did, whatever it was read from

exposure.py            communication that is hidden and exposed
waiting.py             stragglers, and waiting apart from transfer
pass_graphs.py         a traced micro-batch as graphs for the searches
decomposed_graphs.py   the same with collectives cut into sends
gain.py                bounds and a simulation of what could be hidden
advice.py              which settings to try, or "do not"
kineto_writer.py       a run's recorded steps as Kineto traces
"""
