"""How many FLOPs a token costs, for MFU: by formula for our own models, counted for others.

A count runs the forward of the unmodified model on fake tensors, on one device, so that what
tensor-parallel ranks compute twice, or recompute, is not in it. Its backward is taken as twice the
forward, as of any model whose FLOPs are those of matmuls and attention. Attention counts in full,
also under a mask, as in the formula.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from interlace.config import RunConfig
from interlace.graphs.torch_private import fake_tensor_mode
from interlace.models.transformers_model import build, expert_counts
from interlace.train.metrics import model_flops_per_token

FORWARD_AND_BACKWARD = 3
"""Arithmetic of forward and backward over that of the forward alone: a backward has two matmuls for
each of the forward."""


def flops_per_token(config: RunConfig, vocab_size: int) -> tuple[int | None, str]:
    """(FLOPs of forward and backward per token, empty), or (None, why they are not known)."""
    if config.model.source == "hugging_face":
        return counted_flops_per_token(config.model.config, vocab_size, config.data.sequence_length)
    flops = model_flops_per_token(config.model, vocab_size, config.data.sequence_length)
    if flops is None:
        return None, f"the FLOPs of architecture {config.model.architecture!r} are not known"
    return flops, ""


def counted_flops_per_token(
    folder: str, vocab_size: int, sequence_length: int
) -> tuple[int | None, str]:
    """The same of a model of `transformers`, whatever it is built from."""
    experts = expert_counts(folder)
    if experts:
        return None, f"a token meets only some of its experts ({experts})"
    packet = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={packet: _attention_flops})
    try:
        # Weights are drawn, though nowhere: the generator is left as it was.
        with torch.random.fork_rng(devices=[]), fake_tensor_mode(), torch.no_grad():
            model = build(folder, vocab_size=vocab_size, sequence_length=sequence_length)
            tokens = torch.zeros(1, sequence_length, dtype=torch.int64)
            with counter:
                model(input_ids=tokens, use_cache=False)
    except Exception as error:  # whatever the model's code raises where tensors have no values
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"they cannot be counted on fake tensors ({type(error).__name__}: {first})"
    total = counter.get_total_flops()
    if not total:
        return None, "none of its operators has a count of FLOPs"
    return FORWARD_AND_BACKWARD * total // sequence_length, ""


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch counts attention on GPUs only."""
    return sdpa_flop_count(query, key, value)
