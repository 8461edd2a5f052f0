"""From a module to executable graphs: trace, passes over the graphs, export, lower.

Tracing:

blocks.py             the stack of blocks of a module, and its shallow twin
repeat.py             a deep module from the graphs of its twin
periods.py            where the blocks of a twin are in its joint graph
stand_ins.py          calls of blocks marked in a graph, and operators in place of blocks
deep_calls.py         whether all blocks are called as the twin's are, seen with stand-ins
deep_forward.py       the same, seen in the whole forward
python_reads.py       what a forward read of Python, and left-out blocks would have read
joint.py              forward and backward in one graph, and what its inputs are
trace.py              module + example inputs -> forward and backward graph
trace_errors.py       which line of the user's code cannot be traced, and what to do
torch_private.py      the only module that touches private torch APIs, but for those of FSDP2
fsdp_private.py       a module under `fully_shard` as plain data, and as it is without FSDP2

Passes:

accumulate.py         gradients flow into persistent buffers
gradient_layouts.py   each gradient comes to its parameter's layout
joint_backwards.py    gradients of inputs and of weights as two operators
data_parallel.py      gathers of weights and reductions of gradients
fsdp_exchange.py      the same for the groups of weights of `fully_shard`
weight_parts.py       operators of both: parts become whole, gradients sums of parts
dropout.py            masks that depend on numbers, not on what ran before
capture_settings.py   how a forward is captured: sizes, logs, recurrent layers, garbage
ragged.py             operators that would look at how many rows have arrived for experts
random_draws.py       other random numbers that a forward draws, the same way
recompute.py          which values the backward computes again
remake.py             how they are computed again
budget.py             what to keep within a number of bytes, by min-cut
wide_sums.py          which matmuls a device can add to a float32 buffer

Reading, writing, running:

op_graphs.py          fx graph -> OpGraph, the torch-free form that planners read
group_axes.py         which mesh axis each process group of a trace belongs to
module_paths.py       which block of the model a node belongs to
spread.py             over which ranks the values of a strand differ
alike.py              which values of a step ranks hold alike, as all of them traced it
buffers.py            memory of a graph that several operators fill
writer.py             operators written into a graph, moved and erased
strides.py            where elements lie: what a trace saw, and what comes
parts.py              what one phase runs when it does not run all of a strand
chunk_places.py       in which chunk of a model each operator runs
chunk_parts.py        the parts of a walk that chunks run
lower.py              strands in a planned order -> one executable graph
collectives.py        functional collectives become asynchronous c10d calls
gloo_messages.py      gloo's row-moving collectives as messages
expert_messages.py    rows to the ranks of their experts, a message for each expert
"""
