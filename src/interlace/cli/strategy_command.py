"""`interlace plan --global-batch`: how a job should be split over a cluster."""

import gc
import json as json_format
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from interlace.cli.run_file import run_text
from interlace.cli.simulate_command import with_shape
from interlace.config import PipelineConfig, RunConfig
from interlace.errors import InputError
from interlace.hardware.cluster_size import load_sized_cluster
from interlace.report.strategy_tables import strategy_data, strategy_summary
from interlace.run_files import cache_directory, write_whole
from interlace.strategy.contributions import contributions
from interlace.strategy.layout_search import in_16_bits
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.search_cache import cached_search

_COLLECTED_EACH = (50_000, 20, 50)
"""Objects that are made between two collections of garbage while layouts are searched, for 700.
Simulations make millions, which all stay or go with one; with 700 a search of 70B on 512 devices
spent a fifth of its time on looking for rings among them."""


def plan_strategy(
    config: RunConfig,
    *,
    cluster: str,
    global_batch: int,
    output: Path | None,
    json: Path | None,
    expert_load: float = 1.0,
) -> int:
    """Search layouts: tables on stderr, the run file of the best on stdout or in `output`.

    Raises InputError for a cluster without a number of devices, a model that is not known or does
    not fit, and sizes that cannot be dealt."""
    if not cluster:
        raise InputError(
            f"--global-batch {global_batch} asks how to split a job over a cluster, and none is "
            "given",
            hint="add --cluster h100x512",
        )
    on, devices = load_sized_cluster(cluster)
    devices = devices or on.hosts * on.devices_per_host
    if not devices:
        raise InputError(
            f"cluster {cluster!r} does not say how many devices there are",
            hint=f"write their number behind it, as in {cluster}x64, or `hosts` into its file",
        )
    config = in_16_bits(with_shape(config))
    pipeline = replace(config.pipeline, split_at=PipelineConfig().split_at)
    space = LayoutSpace(
        config=replace(config, pipeline=pipeline),
        cluster=on,
        devices=devices,
        global_batch=global_batch,
        expert_load=expert_load,
    )
    folder = cache_directory("layouts") if config.plan.cache else None
    with _collected_rarely():
        found = cached_search(space, folder, _say)
        parts = contributions(found.chosen)
    _say(f"\n{strategy_summary(found, parts)}\n")
    run = found.run()
    if json is not None:
        data = strategy_data(found, parts) | {"run": run.as_dict()}
        write_whole(json, (json_format.dumps(data, indent=1) + "\n").encode())
        _say(f"wrote {json}")
    if output is None:
        sys.stdout.write(run_text(run))
    else:
        write_whole(output, run_text(run).encode())
        _say(f"wrote {output}")
    return 0


@contextmanager
def _collected_rarely() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECTED_EACH)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
