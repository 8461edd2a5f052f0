"""A schedule of your own in one file, run on one process beside the one that everybody has.

python examples/pairs_schedule.py
"""

import torch
from torch import Tensor, nn

import interlace
from interlace.config import PlanConfig
from interlace.ir.actions import Action, backward, forward, together
from interlace.schedules.finder import ScheduleFunction


def pairs(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Micro-batches in pairs: F1, F2|B1, B2, F3, F4|B3, B4, ... Only one more is ever in flight,
    and between pairs there is none."""
    actions = []
    for k in range(1, micro_batches + 1, 2):
        if k == micro_batches:
            actions += [together(forward(k)), together(backward(k))]
        else:
            actions += [together(forward(k)), together(forward(k + 1), backward(k))]
            actions += [together(backward(k + 1))]
    return (tuple(actions),) * ranks


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(x), y)


def gradients(schedule: str | ScheduleFunction) -> list[Tensor]:
    """Of one step over five micro-batches, from the same seed each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    batches = [(torch.randn(8, 32), torch.randn(8, 32)) for _ in range(5)]
    step = interlace.compile_step(
        model, loss_fn, batches[0], schedule=schedule, config=PlanConfig(cache=False)
    )
    loss = step(batches)
    print(f"{step.plan.schedule}: loss {loss.item():.6f}")
    for action in step.actions(len(batches)):
        print(f"    {action}")
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Runs both, and compares gradients bit for bit."""
    mine, plain = gradients(pairs), gradients("one_strand")
    assert all(map(torch.equal, mine, plain))
    print(f"{len(mine)} gradients, the same bits")


if __name__ == "__main__":
    main()
