"""The U-Transformer: sizes of its presets, training on digits, and pipelines of it, whose skips go
from early stages to late ones, against one strand on one rank and plain eager code.

`make test` has two stages, where chunks already hand skips to later ones, and runs the example in
stages; wide are four stages, and the numbers of the example in one process.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from test_compile_step import EXAMPLES, QUICK, near
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from traced_once import traced_once

import interlace
from interlace.data.digits import HELD_OUT, DenoisingBatch, DigitsUnderNoise
from interlace.errors import InputError
from interlace.ir.actions import Direction
from interlace.models.u_transformer import PRESETS, UTransformer, UTransformerConfig, preset
from interlace.runtime.chunks import Placement, chunked
from interlace.runtime.traced_strands import build_strands
from wide import WIDE

MILLION = 1_000_000
MICRO_BATCHES = 4
SPLITS = {
    ("one_f_one_b", 2): ("up.0",),
    ("zb_v", 2): ("down.2", "middle", "up.2"),
    ("folded", 4): ("down.1", "down.2", "down.3", "middle", "up.1", "up.2", "up.3"),
}
"""Sub-modules with which chunks begin, by schedule and number of ranks."""
SKIPS = {
    "one_f_one_b": {(0, 1)},
    "zb_v": {(0, 2), (0, 3), (1, 2)},
    "folded": {(0, 6), (0, 7), (1, 5), (1, 6), (2, 4), (2, 5), (3, 4)},
}
"""The chunks that make and read skips, by schedule. Under `folded` on four ranks, chunks k and
7 - k are on one rank."""


@pytest.mark.parametrize(
    ("name", "parameters", "named"),
    [
        ("470m", 469_914_884, 470 * MILLION),
        ("1b", 1_057_153_924, 1000 * MILLION),
        ("2b", 2_071_848_580, 2000 * MILLION),
    ],
)
def test_presets_have_the_sizes_of_their_names(name: str, parameters: int, named: int) -> None:
    """Counted without memory; within 6 % of the name."""
    config = preset(name)
    with torch.device("meta"):
        model = UTransformer(config)
        found = model(torch.empty(2, 3, 32, 32), torch.empty(2))
    assert found.shape == (2, 4, 32, 32)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert abs(parameters / named - 1) < 0.06


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": 0}, "channels = 0 is below 1"),
        ({"multiples": ()}, "names no level"),
        ({"attention": (True,)}, "attention says 1 levels, and multiples 4"),
        ({"image": 36}, "image = 36 cannot be halved 3 times"),
        ({"heads": 3}, "channels = 16 is no multiple of heads = 3"),
        ({"channels": 5, "heads": 1, "groups": 5}, "channels = 5 is odd"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        replace(PRESETS["small"], **wrong)
    assert message in refusal.value.message
    assert refusal.value.hint


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match="no U-Transformer '1B'") as refusal:
        preset("1B")
    assert "1b" in refusal.value.hint


def test_a_chunk_that_begins_with_a_growing_convolution_is_handed_the_small_image() -> None:
    """And hands back its gradient, which it adds up itself."""
    sizes = replace(PRESETS["small"], image=8, multiples=(1, 3, 2, 2))
    batch = torch.randn(2, 1, 8, 8), torch.rand(2)
    strands = build_strands(_Mean(UTransformer(sizes)), batch, {})
    placement = Placement(rank_of=(0, 1), split_at=("inner.up.2.grow",))
    messages = chunked(strands, placement).handovers.messages
    channels = sizes.channels * sizes.multiples[1]
    for route in ((Direction.FORWARD, 0, 1), (Direction.BACKWARD, 1, 0)):
        elements = [carried.like.numel() for carried in messages[route]]
        assert 2 * channels * 4 * 4 in elements
        assert 2 * channels * 8 * 8 not in elements


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        return self.inner(noisy, level).mean()


def test_digits_follow_from_seed_and_step() -> None:
    digits = DigitsUnderNoise(seed=3)
    first, again = (source.micro_batches(5, 2, 4) for source in (digits, DigitsUnderNoise(seed=3)))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for other in (digits.micro_batches(6, 2, 4), DigitsUnderNoise(seed=4).micro_batches(5, 2, 4)):
        assert not torch.equal(first[0][0], other[0][0])
    noisy, level, clean = first[0]
    assert (noisy.shape, level.shape, clean.shape) == ((4, 1, 32, 32), (4,), (4, 1, 32, 32))
    assert not torch.equal(first[0][2], first[1][2])
    assert float(clean.min()) == -1
    assert float(clean.max()) <= 1
    # What was added is noise of variance 1, times its level.
    share = level[:, None, None, None]
    noise = (noisy - (1 - share) * clean) / share
    assert abs(float(noise.std()) - 1) < 0.05
    held_out, level, clean = digits.held_out(0.0)
    assert len(clean) == HELD_OUT
    assert torch.equal(held_out, clean)


@pytest.mark.parametrize(
    ("count", "size", "message"), [(0, 4, "count = 0"), (2, 0, "size = 0 is below 1")]
)
def test_batches_of_nothing_are_refused(count: int, size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DigitsUnderNoise().micro_batches(0, count, size)


def test_digits_that_were_not_held_out_are_refused() -> None:
    with pytest.raises(InputError, match="size = 98, and 97 digits"):
        DigitsUnderNoise().held_out(0.5, HELD_OUT + 1)
    with pytest.raises(InputError, match=r"level = 1\.5 is not between"):
        DigitsUnderNoise().held_out(1.5)


def tiny() -> UTransformer:
    """All four levels on images of 16 x 16."""
    sizes = {"channels": 8, "multiples": (1, 2, 2, 2), "heads": 2, "groups": 4, "image": 16}
    torch.manual_seed(7)
    return UTransformer(UTransformerConfig(**sizes, channels_in=1, channels_out=1))


def halves(batches: list[DenoisingBatch]) -> list[DenoisingBatch]:
    """Every second position of the images."""
    return [(noisy[..., ::2, ::2].contiguous(), level, clean[..., ::2, ::2].contiguous())
            for noisy, level, clean in batches]  # fmt: skip


def denoising_loss(module: nn.Module, noisy: Tensor, level: Tensor, clean: Tensor) -> Tensor:
    return (module(noisy, level) - clean).square().mean()


def losses_of_training(steps: int) -> list[float]:
    """Of each step of plain eager training."""
    digits, model = DigitsUnderNoise(), tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, foreach=False)
    found = []
    for step in range(steps):
        [batch] = halves(digits.micro_batches(step, 1, 16))
        loss = denoising_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_the_model_learns_the_digits() -> None:
    """In eager mode: the loss falls, and a second run has the same bits."""
    losses = losses_of_training(30)
    assert sum(losses[-5:]) / 5 < 0.4 * losses[0]
    assert losses_of_training(4) == losses[:4]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def plain_eager(batches: list[DenoisingBatch]) -> dict[str, Tensor]:
    """Gradients of the mean loss in float64, and the losses."""
    module = tiny().double()
    losses = [denoising_loss(module, *batch) for batch in batches]
    torch.stack(losses).mean().backward()
    return {**gradients(module), "losses": torch.stack(losses).detach()}


def test_one_strand_is_near_eager_code() -> None:
    """In float64, within 1e-10 of the largest gradient."""
    batches = halves(DigitsUnderNoise().micro_batches(0, MICRO_BATCHES, 2))
    double = [(noisy.double(), level.double(), clean.double()) for noisy, level, clean in batches]
    module = tiny().double()
    step = interlace.compile_step(module, denoising_loss, double[0], strands=1, config=QUICK)
    step(double)
    assert near({**gradients(module), "losses": torch.stack(step.losses)}, plain_eager(double))


def one_strand() -> dict[str, Tensor]:
    """What one strand gives in this process, in float32."""
    batches = halves(DigitsUnderNoise().micro_batches(0, MICRO_BATCHES, 2))
    module = tiny()
    step = interlace.compile_step(module, denoising_loss, batches[0], strands=1, config=QUICK)
    step(batches)
    evaluated = step.evaluate(batches)
    return {**gradients(module), "losses": torch.stack(step.losses), "evaluated": evaluated}


def staged() -> dict[str, Any]:
    """By schedule: what differs from one strand of the same graphs on this rank."""
    with gloo_group(60), traced_once():
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        batches = halves(DigitsUnderNoise().micro_batches(0, MICRO_BATCHES, 2))
        right = one_strand()
        found: dict[str, Any] = {"all": sorted(set(right) - {"losses", "evaluated"})}
        for schedule, split_at in ((name, at) for (name, p), at in SPLITS.items() if p == ranks):
            module = tiny()
            step = interlace.compile_step(
                module, denoising_loss, batches[0], mesh=mesh, schedule=schedule,
                split_at=split_at, config=QUICK,
            )  # fmt: skip
            step(batches)
            own = gradients(module)
            values = {
                **own,
                "losses": torch.stack(step.losses),
                "evaluated": step.evaluate(batches),
            }
            found[schedule] = {
                "wrong": [n for n, value in values.items() if not torch.equal(value, right[n])],
                "own": sorted(own),
                "edges": sorted(step.strands.handovers.edges),
            }
        return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=WIDE)])
def test_pipelines_have_the_bits_of_one_strand(ranks: int) -> None:
    """Losses on all ranks, each gradient on the rank of its stage; cut at named sub-modules."""
    found = [r.value for r in run_ranks("test_u_transformer:staged", ranks, timeout_s=120)]
    for schedule in (name for name, p in SPLITS if p == ranks):
        of_ranks = [each[schedule] for each in found]
        assert [each["wrong"] for each in of_ranks] == [[]] * ranks, schedule
        held = [name for each in of_ranks for name in each["own"]]
        assert sorted(set(held)) == found[0]["all"]
        assert {tuple(edge) for edge in of_ranks[0]["edges"]} >= SKIPS[schedule]
        assert of_ranks[0]["edges"] == of_ranks[-1]["edges"]
        assert all(0 < len(each["own"]) < len(found[0]["all"]) for each in of_ranks)


def losses_of_example(start: list[str], picture: Path) -> list[float]:
    """What the example printed."""
    command = [sys.executable, *start, str(EXAMPLES / "denoise_digits.py")]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        [*command, "--steps", "11", "--picture", str(picture)],
        check=False, capture_output=True, text=True, timeout=400,
        env={**env, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"wrote {picture}"
    return [float(line.split()[-1]) for line in lines[:-1]]


@pytest.fixture(scope="module")
def staged_example(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """What the example printed on two ranks, and its picture."""
    picture = tmp_path_factory.mktemp("example") / "staged.png"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return losses_of_example(ranks, picture), picture


def test_the_example_runs_in_stages(staged_example: tuple[list[float], Path]) -> None:
    """The loss falls, also on digits that were held out; and it draws."""
    (first, last, held_out), picture = staged_example
    assert last < 0.5 * first
    assert held_out < 0.5 * first
    assert picture.read_bytes().startswith(b"\x89PNG")


@WIDE
def test_the_example_has_the_same_numbers_alone(
    staged_example: tuple[list[float], Path], tmp_path: Path
) -> None:
    alone = losses_of_example([], tmp_path / "alone.png")
    assert staged_example[0] == pytest.approx(alone, rel=1e-4)
    assert (tmp_path / "alone.png").read_bytes().startswith(b"\x89PNG")
