"""Joins the messages between two ranks, for who begins all messages of a plan at once.

A plan cuts what it moves into messages that are small against the load of the busiest port, so that
chains of forwards fill and ports share their time. Where a rank begins all its sends together, the
cuts of what nobody passes on gain nothing, and each message costs a rank's core some 0.2 ms on
gloo.
"""

from collections.abc import Iterable
from dataclasses import replace

from interlace.reshard.planning.transfer_plan import Part, Transfer, TransferPlan


def joined(plan: TransferPlan) -> TransferPlan:
    """The same plan with one message from each rank to each other for all that comes from where it
    was at first and goes no further, in the place of the first such; forwards stay as they are.
    `digest` and times remain those of `plan`."""
    passed_on = {
        (transfer.sender, part.task)
        for transfer in plan.transfers
        for part in transfer.parts
        if transfer.sender not in plan.tasks[part.task].senders
    }

    def goes_alone(transfer: Transfer) -> bool:
        return all(
            transfer.sender in plan.tasks[part.task].senders
            and (transfer.receiver, part.task) not in passed_on
            for part in transfer.parts
        )

    whole: dict[tuple[int, int], list[Part]] = {}
    for transfer in filter(goes_alone, plan.transfers):
        whole.setdefault((transfer.sender, transfer.receiver), []).extend(transfer.parts)
    transfers = []
    for transfer in plan.transfers:
        if not goes_alone(transfer):
            transfers.append(transfer)
        elif parts := whole.pop((transfer.sender, transfer.receiver), None):
            transfers.append(replace(transfer, parts=tuple(_runs(parts))))
    return replace(plan, transfers=tuple(transfers))


def _runs(parts: Iterable[Part]) -> list[Part]:
    """In the order of tasks and their elements; parts that follow each other as one."""
    runs: list[Part] = []
    for part in sorted(parts, key=lambda each: (each.task, each.start)):
        if runs and runs[-1].task == part.task and runs[-1].stop == part.start:
            runs[-1] = Part(part.task, runs[-1].start, part.stop)
        else:
            runs.append(part)
    return runs
