"""A searched pipeline runs: with the bits of one strand, as an object and from its file, where
ranks have unequal numbers of chunks and fewer micro-batches come than were searched for, or more to
be evaluated."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from test_pipeline_step import QUICK, built, language, loss_of, wanted
from torch.distributed.device_mesh import init_device_mesh
from traced_once import traced_once

import interlace
from interlace.schedules.schedule_text import write_schedule
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.search.pipelines.pipeline_search import SearchedPipeline, search_pipeline

MICRO_BATCHES = 6


def found(ranks: int, overlap: float) -> SearchedPipeline:
    """For a model whose last block takes as long as four."""
    times = [3, 1, 2, 1, 1, 2, 1, 1, 4]
    units = tuple(
        ModelUnit(
            name=f"blocks.{n}", forward_ns=1000 * ns, input_ns=1000 * ns, weight_ns=900 * ns,
            boundary_ns=50, saved_bytes=8, kept_bytes=4,
        )
        for n, ns in enumerate(times)
    )  # fmt: skip
    problem = PipelineProblem(
        units=units, ranks=ranks, micro_batches=MICRO_BATCHES, overlap=overlap
    )
    return search_pipeline(problem, tries=200)


def blocks_of_rank(pipeline: SearchedPipeline, rank: int) -> list[str]:
    """The numbers of the blocks that were given to a rank."""
    layout, units = pipeline.layout, pipeline.problem.units
    own = [chunk for chunk, owner in enumerate(layout.rank_of) if owner == rank]
    return sorted(u.name.split(".")[1] for chunk in own for u in layout.of_chunk(units, chunk))


def searched_steps(folder: str) -> dict[str, Any]:
    """By case: what differs from one strand, and what this rank has."""
    with gloo_group(60), traced_once():
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        results: dict[str, Any] = {}
        for name, overlap, count in (("object", 0.0, MICRO_BATCHES), ("file", 0.3, 4)):
            pipeline = found(ranks, overlap)
            schedule: Any = pipeline.schedule
            if name == "file":
                schedule = str(Path(folder, f"rank{dist.get_rank()}", "found.txt"))
                Path(schedule).parent.mkdir()
                text = write_schedule(pipeline.actions, pipeline.split_at)
                Path(schedule).write_text(text)
            batches = language(count)
            right = wanted(built, batches)
            model = built()
            torch.manual_seed(11)  # as `wanted` has it, for dropout
            step = interlace.compile_step(
                model, loss_of, batches[0], mesh=mesh, schedule=schedule,
                config=QUICK,
            )  # fmt: skip
            step(batches)
            again = step.evaluate([*batches, *batches, batches[0]])
            parts = [step.evaluated[at : at + count] for at in (0, count, 2 * count)]
            own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            results[name] = {
                "wrong": [n for n, grad in own.items() if not grad.equal(right[n])],
                "own": sorted(own),
                "evaluated": torch.stack(parts[0]).mean().equal(right["evaluated"])
                and torch.stack(parts[1]).equal(torch.stack(parts[0]))
                and parts[2][0].equal(parts[0][0])
                and again.equal(torch.stack(step.evaluated).mean()),
                "all": sorted(set(right) - {"losses", "evaluated"}),
                "blocks": sorted({n.split(".")[1] for n in own if n.startswith("blocks.")}),
                "planned": blocks_of_rank(pipeline, dist.get_rank()),
                "rank_of": pipeline.layout.rank_of,
                "parts": sorted(step.strands.parts),
            }
        return results


def test_a_searched_pipeline_has_the_bits_of_one_strand(tmp_path: Path) -> None:
    """Each rank has the chunks that the search gave it."""
    results = run_ranks(
        "test_searched_pipeline:searched_steps", 2, args=[str(tmp_path)], timeout_s=200
    )
    for name in ("object", "file"):
        each = [result.value[name] for result in results]
        assert [one["wrong"] for one in each] == [[], []]
        assert all(one["evaluated"] for one in each)
        assert sorted({n for one in each for n in one["own"]}) == each[0]["all"]
        for rank, one in enumerate(each):
            assert one["blocks"] == one["planned"]
            chunks = [c for c, owner in enumerate(one["rank_of"]) if owner == rank]
            assert [c for c in range(99) if f"forward_{c}" in one["parts"]] == chunks
