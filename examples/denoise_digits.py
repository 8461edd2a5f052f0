"""Train a U-Net with attention to take noise out of hand-written digits, in pipeline stages.

    torchrun --nproc-per-node 2 examples/denoise_digits.py   # 2 stages; 4 work too
    python examples/denoise_digits.py                        # one process, the same losses

The long skips of the model go straight from early stages to late ones, and nothing in the model
says so. At the end, digits that were never trained on are written to digits.png: noisy, restored,
clean. Needs `pip install 'interlace[images]'`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import interlace
from interlace.data.digits import DenoisingBatch, DigitsUnderNoise
from interlace.models.u_transformer import UTransformer, preset

MICRO_BATCHES, BATCH = 4, 8
SAMPLES, LEVEL = 8, 0.6


def loss_fn(model: nn.Module, noisy: Tensor, level: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """The mean square error, and the restored images, which the step keeps."""
    restored = model(noisy, level)
    return F.mse_loss(restored, clean), restored


def on(device: str, batches: list[DenoisingBatch]) -> list[DenoisingBatch]:
    """The batches on that device."""
    return [tuple(part.to(device) for part in batch) for batch in batches]


def compiled(model: nn.Module, example: DenoisingBatch, mesh: DeviceMesh | None) -> interlace.Step:
    """The step: one strand alone, else a folded pipeline in which each rank has an early chunk and
    the late one that reads its skips."""
    if mesh is None:
        return interlace.compile_step(model, loss_fn, example, strands=1)
    return interlace.compile_step(model, loss_fn, example, mesh=mesh, schedule="folded")


def draw(batch: DenoisingBatch, restored: Tensor, file: Path) -> None:
    """Three rows of pictures: noisy, restored, clean."""
    noisy, _, clean = (part.cpu() for part in batch)
    figure = Figure(figsize=(SAMPLES, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, SAMPLES)
    rows = {"noisy": noisy, "restored": restored.cpu(), "clean": clean}
    for own, (name, images) in zip(axes, rows.items(), strict=True):
        own[0].set_ylabel(name)
        for axis, image in zip(own, images, strict=True):
            axis.imshow(image[0], cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
    figure.savefig(file, dpi=120)


def train(steps: int, mesh: DeviceMesh | None, device: str, file: Path) -> None:
    """The loop; rank 0 prints and draws."""
    torch.manual_seed(0)
    model, digits = UTransformer(preset("small")).to(device), DigitsUnderNoise()
    batches = on(device, digits.micro_batches(0, MICRO_BATCHES, BATCH))
    step = compiled(model, batches[0], mesh)
    own = interlace.stage_parameters(step).values()
    optimizer = torch.optim.AdamW(own, lr=2e-3, foreach=False)
    chief = mesh is None or mesh.get_rank() == 0
    for index in range(steps):
        loss = step(on(device, digits.micro_batches(index, MICRO_BATCHES, BATCH)))
        interlace.clip_grad_norm_(step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if chief and (index % 10 == 0 or index == steps - 1):
            print(f"step {index + 1:3d}  loss {float(loss):.6f}", flush=True)
    [held_out] = on(device, [digits.held_out(LEVEL, SAMPLES)])
    error = step.evaluate([held_out])
    restored = [results[0] for results in step.results]
    if chief:
        print(f"held out   loss {float(error):.6f}")
    if restored:
        draw(held_out, restored[0], file)
        print(f"wrote {file}")


def main() -> None:
    """Join the other ranks if there are any, and train."""
    parser = argparse.ArgumentParser(description="Take noise out of digits, in pipeline stages.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", type=Path, default=Path("digits.png"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        train(options.steps, None, device, options.picture)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("pp",))
        train(options.steps, mesh, device, options.picture)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
