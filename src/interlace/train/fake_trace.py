"""The graphs of one rank of a run, without a second process and without weights: the model is built
from fake tensors in a fake world of the right size, and traced as a rank would."""

from dataclasses import replace
from functools import partial

import torch

from interlace.config import RunConfig
from interlace.data.tokens import open_tokenizer
from interlace.decompose.rewrite.apply import Decompose
from interlace.degrees import resolve_layout
from interlace.experts.merged_sends import expected_sends
from interlace.garbage import no_collections
from interlace.graphs.recompute import policy_of
from interlace.graphs.torch_private import end_fake_world, fake_tensor_mode, init_fake_world
from interlace.hardware.cluster import Cluster
from interlace.models.transformers_model import published_sizes
from interlace.parallel.data import data_layout, gathered_in_stage
from interlace.parallel.meshes import build_meshes
from interlace.parallel.tensor import loss_context
from interlace.runtime.candidates import Candidates, trace_candidates
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.schedules.finder import of_strands
from interlace.train.built_model import build_module, vocabulary
from interlace.train.fake_depth import deepen, with_few_layers
from interlace.train.plan_costs import decompose_of
from interlace.train.session import DTYPES


@no_collections()
def trace_fake(config: RunConfig, cluster: Cluster | None = None) -> Candidates:
    """The graphs of one rank of `config` for two strands, traced on fake tensors; of a pipeline
    those of the whole model, not cut, with how ranks share weights that they will gather in
    chunks. Collectives are decomposed by times of `cluster`, or else of
    the machine of the run file."""
    ranks, in_stages = config.parallel.ranks, config.parallel.pipeline > 1
    config = resolve_layout(config, ranks)
    tensor = config.parallel.tensor
    tokens = -(-open_tokenizer(config.data.tokenizer).vocab_size // tensor) * tensor
    vocab_size = vocabulary(config, tokens)
    init_fake_world(ranks)
    try:
        meshes = build_meshes(config.parallel, "cpu")
        with fake_tensor_mode():
            dtype = DTYPES[config.train.dtype]
            built, device = with_few_layers(config), torch.device("cpu")
            module = build_module(built, meshes, vocab_size, device, dtype)
            copies = built.model.layers < config.model.layers
            if copies:
                deepen(module.get_submodule("model"), config.model.layers)
            shape = (
                config.train.micro_batch_size,
                config.data.sequence_length // config.parallel.context,
            )
            # Two tensors: one given twice would be traced as a single input.
            text, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            reduce_dtype = DTYPES[config.train.reduce_dtype]
            trace = partial(
                build_strands,
                module,
                (text, targets),
                meshes.axis_of_group,
                data=None
                if in_stages
                else data_layout(module, config.parallel, meshes, reduce_dtype),
                recompute=policy_of(config.train),
                repeat=True,
                copies=copies,
            )
            staged = gathered_in_stage(config.parallel, module, meshes)

            def traced(decompose: Decompose | None) -> Strands:
                found = trace(decompose=decompose)
                return replace(found, data=staged) if in_stages else found

            with loss_context(meshes.tensor):
                return trace_candidates(
                    traced,
                    decompose_of(config, cluster),
                    config.overlap.passes,
                    schedule=of_strands(1 if in_stages else 2),
                )
    finally:
        end_fake_world()


def describe_model(config: RunConfig) -> str:
    """`llama, 80 layers of width 8192, sequence 8192 x 1, bfloat16, 64 ranks`; with experts also
    `2 of 8 experts`, and what merged sends save of the rows where every choice is as likely."""
    (architecture, layers, width), train = shape_of(config), config.train
    experts = config.model.experts
    routed = f", {experts.chosen} of {experts.count} experts" if experts.count else ""
    if experts.count and config.parallel.expert_sends == "merged":
        rows = 1000 * experts.chosen
        sends = expected_sends(1000, experts.chosen, experts.count, config.parallel.expert)
        routed += f" ({1 - sends / rows:.0%} fewer rows by merged sends)"
    return (
        f"{architecture}, {layers} layers of width {width}{routed}, sequence "
        f"{config.data.sequence_length} x {train.micro_batch_size}, {train.dtype}, "
        f"{config.parallel.ranks} ranks"
    )


def shape_of(config: RunConfig) -> tuple[str, int, int]:
    """(architecture, layers, width) of the model that the run trains."""
    model = config.model
    if model.source == "hugging_face":
        return published_sizes(model.config)
    return model.architecture, model.layers, model.width
