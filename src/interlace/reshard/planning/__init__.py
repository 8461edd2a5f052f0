"""What moves between two layouts, and in which order. Torch-free.

make_plan.py           makes a plan: tasks, hops, order, proof
transfer_plan.py       what a plan is: tensors, tasks, messages in one order
describe.py            a plan as text
layout.py              which box of a tensor every rank holds
inferred_layouts.py    layouts on two meshes, from the shapes of ranks' parts
tasks.py               unit tasks by tile intersection
resharding_problem.py  one problem, planned in one way or another
strategies.py          the paper's four ways for a bundle to travel
hops.py                messages while a plan is made, and bytes given to every end
join.py                one message from rank to rank, where all are begun at once
chunking.py            how large messages are, and our order: chunks on trees
ends.py                the two ends that a message occupies, and for how long
ordering.py            the paper's model, and its two simple orders
depth_first.py         the paper's depth-first search
random_greedy.py       the paper's randomised greedy order
exact.py               the shortest order of the paper's model, proved
open_shop.py           our order of chunks: an open shop of ends
simulate.py            runs a plan on paper, and proves that it can run
move_bounds.py         what the busiest port has to carry at best
"""
