"""Plans run on real processes.

traced_strands.py     from a laid-out module to graphs that can be planned and run
candidates.py         graphs to choose from: passes decomposed or whole, folded or not
chunks.py             graphs of a model cut into those of its chunks, which ranks share
stage_gathers.py      weights that the chunks of a stage gather
handovers.py          what chunks hand to each other
executor.py           one optimizer step, action by action, operators issued in plan order
cuda_graph.py         a step captured as a CUDA graph, and replayed
pipeline_executor.py  the same on a rank of a pipeline, with what it sends and receives
pipeline_record.py    what all ranks of a pipeline did in a step, and what was predicted
split_places.py       where chunks begin if nobody says so, for any layout
stage_link.py         tensors on their way between the ranks of a pipeline
step_ranks.py         who runs a step: one mesh, or one for each stage
stage_meshes.py       the meshes of stages that are laid out differently
boundaries.py         what crosses between such stages, and how it moves
laid_out_link.py      the same between such stages
joint_end.py          a step of a pipeline that fails ends on all ranks
stream_watch.py       the same where exchanges wait in streams, as on NCCL
recorder.py           a lowered graph run operator by operator, with times
eager_recorder.py     eager autograd as a timeline
eager_check.py        a step against eager autograd: losses, gradients, times
user_module.py        a user's module with its loss, and its tensors
gradients.py          buffers that graphs add to, handed out as `parameter.grad`
fsdp_gradients.py     the same for weights under `fully_shard`
fsdp_step.py          what a step of a module under `fully_shard` can be
replicated_module.py  what `DistributedDataParallel` does beside averaging gradients
clipping.py           the norm of gradients that lie on several ranks
batch_form.py         batches of dicts and lists as tuples of tensors, and back
step_inputs.py        what a user gives to a step, checked
same_shapes.py        whether ranks have micro-batches of one shape at a step
mesh_axes.py          what the axes of a user's mesh mean for a step
same_module.py        what ranks that compile a module must hold alike
binding.py            a step is bound to what it was compiled for
module_tree.py        whether the tree of modules is still the same
module_tensors.py     which parameters and buffers were replaced since
memory_limit.py       what a rank holds beside values, and how much a plan may add
peak_memory.py        peak memory of one step, as it is
rival.py              a plan by PyTorch's own overlap scheduler, to compare with
"""
