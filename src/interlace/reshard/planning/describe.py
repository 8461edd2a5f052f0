"""A plan as text."""

from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.transfer_plan import Task, TransferPlan

LINES = 12
"""Tasks and hosts that are shown, the largest first; a choice."""
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
"""Units of a size and their bytes, the largest first."""


def describe(plan: TransferPlan) -> str:
    """Tasks, senders, order, bytes per link, predicted time and lower bound."""
    whole = sum(_task_bytes(plan, task) for task in plan.tasks)
    moved = sum(plan.transfer_bytes(transfer) for transfer in plan.transfers)
    longer = plan.predicted_ns / plan.lower_bound_ns if plan.lower_bound_ns else 1.0
    head = [
        f"{len(plan.specs)} tensors, {_size(whole)}: {len(plan.tasks)} unit tasks, "
        f"{len(plan.transfers)} messages of {_size(moved)} in all, {len(plan.copies)} local copies",
        f"strategy {plan.strategy}, order {plan.order}",
        f"predicted {plan.predicted_ns / 1e6:.3f} ms, lower bound "
        f"{plan.lower_bound_ns / 1e6:.3f} ms ({longer:.3f} times)",
    ]
    return "\n".join([*head, *_tasks(plan), *_links(plan), f"plan {plan.digest[:16]}"])


def _tasks(plan: TransferPlan) -> list[str]:
    size = [_task_bytes(plan, task) for task in plan.tasks]
    used: dict[int, dict[int, int]] = {}
    for transfer in plan.transfers:
        for part in transfer.parts:
            if transfer.sender in plan.tasks[part.task].senders:
                sent = used.setdefault(part.task, {})
                sent[transfer.sender] = sent.get(transfer.sender, 0) + plan.part_bytes(part)
    largest = sorted(range(len(plan.tasks)), key=lambda i: (-size[i], i))[:LINES]
    lines = [f"tasks (the {len(largest)} largest of {len(plan.tasks)}):" if largest else "no tasks"]
    for i in sorted(largest):
        task = plan.tasks[i]
        name = plan.specs[task.tensors[0]].name
        more = f" and {len(task.tensors) - 1} like it" if len(task.tensors) > 1 else ""
        box = " x ".join(f"{start}:{stop}" for start, stop in task.box) or "scalar"
        senders = ", ".join(f"{r} ({_size(b)})" for r, b in sorted(used.get(i, {}).items())[:8])
        lines.append(
            f"  {i}: {name}{more} [{box}] {_size(size[i])}; held by {_ranks(task.senders)}; "
            f"sent by {senders or 'none'}; to {_ranks(task.receivers)}"
        )
    return lines


def _links(plan: TransferPlan) -> list[str]:
    links = Links(plan.topology)
    out, into, inside = ([0] * len(plan.topology.hosts) for _ in range(3))
    for transfer in plan.transfers:
        size = plan.transfer_bytes(transfer)
        a, b = links.host[transfer.sender], links.host[transfer.receiver]
        if a == b:
            inside[a] += size
        else:
            out[a] += size
            into[b] += size
    busy = [h for h in range(len(out)) if out[h] or into[h] or inside[h]]
    shown = sorted(busy, key=lambda h: (-max(out[h], into[h]), h))[:LINES]
    lines = [f"bytes per host (the {len(shown)} busiest of {len(busy)}):"] if shown else []
    return lines + [
        f"  host {h}: out {_size(out[h])}, in {_size(into[h])}, inside {_size(inside[h])}"
        for h in sorted(shown)
    ]


def _task_bytes(plan: TransferPlan, task: Task) -> int:
    return task.elements * plan.specs[task.tensors[0]].itemsize


def _size(size_bytes: int) -> str:
    for unit, name in UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def _ranks(ranks: tuple[int, ...]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return f"{text} and {len(ranks) - 8} more" if len(ranks) > 8 else text or "none"
