"""Train an MLP-Mixer (arXiv 2105.01601) on generated images, split over ranks by a plan of its own.

    torchrun --nproc-per-node 2 examples/vision_mixer.py
    python examples/vision_mixer.py                          # one process, nothing to hide

Every image shows stripes of one of eight directions under noise; the model tells which. What makes
it an interlaced run is the call of `interlace.compile_step`; the rest is plain PyTorch.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import interlace

CLASSES = 8
IMAGE, PATCH = 32, 8
BATCH, MICRO_BATCHES = 16, 4


class FeedForward(nn.Module):
    """Two linear layers over the last dimension."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.patch_norm = nn.LayerNorm(width)
        self.patch_mixer = FeedForward(patches, 4 * width)
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mixer = FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, width] -> [B, patches, width]."""
        x = x + self.patch_mixer(self.patch_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mixer(self.channel_norm(x))


class Mixer(nn.Module):
    """Classifies images."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        patches = (IMAGE // PATCH) ** 2
        self.embed = nn.Conv2d(3, width, kernel_size=PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block(patches, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> logits [B, classes]."""
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def split(model: Mixer, mesh: DeviceMesh) -> None:
    """The tensor-parallel plan: inner features of every feed-forward layer are split over ranks.

    `PrepareModuleInput` makes the input's gradient a sum over ranks, an all-reduce in backward;
    the row layer's output is another one in forward. Both are hidden under the other micro-batch.
    """
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        for mixer in (block.patch_mixer, block.channel_mixer):
            for name, style in plan.items():
                parallelize_module(mixer.get_submodule(name), mesh, style)


def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Called with the module and one micro-batch."""
    return F.cross_entropy(model(images), labels, label_smoothing=0.05)


def batches(step: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a step, the same on every rank: all of them share each layer."""
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (MICRO_BATCHES, BATCH), generator=draw)
    phase = 2 * math.pi * torch.rand(labels.shape, generator=draw)
    rows, columns = torch.meshgrid(torch.arange(IMAGE), torch.arange(IMAGE), indexing="ij")
    angle = (math.pi * labels / CLASSES)[..., None, None]
    wave = torch.sin(0.8 * (rows * angle.sin() + columns * angle.cos()) + phase[..., None, None])
    noise = torch.randn(MICRO_BATCHES, BATCH, 3, IMAGE, IMAGE, generator=draw)
    images = wave.unsqueeze(2) + 0.5 * noise
    return [(images[i].to(device), labels[i].to(device)) for i in range(MICRO_BATCHES)]


def train(steps: int, strands: int, mesh: DeviceMesh | None, device: str) -> None:
    """The loop; rank 0 prints."""
    torch.manual_seed(0)
    model = Mixer().to(device)
    if mesh is not None:
        split(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step = interlace.compile_step(model, loss_fn, batches(0, device)[0], mesh=mesh, strands=strands)
    chief = mesh is None or mesh.get_rank() == 0
    for index in range(steps):
        loss = step(batches(index, device))
        optimizer.step()
        optimizer.zero_grad()
        if chief and (index % 5 == 0 or index == steps - 1):
            print(f"step {index + 1:3d}  loss {float(loss):.6f}")
    timeline = step.record(batches(steps, device))
    if chief:
        print(
            f"communication {timeline.communication_ns() / 1e6:.1f} ms, "
            f"of which exposed {timeline.exposed_ns() / 1e6:.1f} ms"
        )


def main() -> None:
    """Join the other ranks if there are any, and train."""
    parser = argparse.ArgumentParser(description="Train an MLP-Mixer in two strands.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strands", type=int, choices=(1, 2), default=2)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        train(options.steps, options.strands, None, device)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
        train(options.steps, options.strands, mesh, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
