"""Compiles a model's layers on a small sample of the model, before there is memory for the model itself.

torch finds compiled code by the code of the layer and by guards on types, shapes and settings. So the passes of the
whole model, in the same process, find what passes of the sample have compiled: for logprobs, for training, and for
recomputation in the backward pass.

Kernels are tuned for the sizes of the first pass, so a sample's pass has as many tokens as fit its memory.
"""

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nemo_offload_rl.backends.dtensor.attention import CAPPED, MASKED
from nemo_offload_rl.backends.dtensor.built import BuiltModel
from nemo_offload_rl.backends.dtensor.model import can_be_compiled
from nemo_offload_rl.backends.dtensor.one_rank import add_gradients
from nemo_offload_rl.backends.dtensor.parallel import gathered
from nemo_offload_rl.backends.dtensor.stand_ins import SteppedModel
from nemo_offload_rl.backends.ranks import join_process_group
from nemo_offload_rl.backends.scoring.readers import ReadScores
from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.protocols.loss import TokenStat

_SCORED = 16  # tokens of a row
_FEWEST_TOKENS = 64
_LONGEST_ROW = {CAPPED: 512, MASKED: 4096}  # attention that keeps scores or a mask of each pair of tokens


def compile_early(
    settings: PolicySettings, process: ProcessInfo, most_bytes: int, *, is_frozen: bool = False
) -> str | None:
    """Compile the layers that the settings' model will have on this rank's device.

    Takes and frees about `most_bytes` of its memory at most. The process group that the sample needs ends with it.

    Args:
        settings: Settings of the policy, or of a teacher in the form of a policy's.
        process: This rank.
        most_bytes: Device memory of the passes.
        is_frozen: The model is a teacher.

    Returns:
        The reason why nothing was compiled; None if the model's layers were, or are never compiled.
    """
    with ExitStack() as made:
        alone = replace(process, rank=0, world_size=1)
        join_process_group(alone, made)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)  # compiled code depends on it
        sample = BuiltModel(settings, alone, is_frozen=is_frozen, is_sample=True)
        if not can_be_compiled(sample.module.causal_lm):
            return None
        return run_passes(sample, settings, most_bytes, trains=not is_frozen)


def run_passes(sample: BuiltModel, settings: PolicySettings, most_bytes: int, *, trains: bool = True) -> str | None:
    """Take a pass for logprobs, and with `trains` one for training, over a sample's layers; see `compile_early`."""
    fixed_bytes, token_bytes = _needs(sample)
    num_tokens = (most_bytes - fixed_bytes) // token_bytes
    if num_tokens < _FEWEST_TOKENS:
        return f"its passes need {(fixed_bytes + _FEWEST_TOKENS * token_bytes) / 2**30:.2f} GiB of device memory"
    run = _run_layers if sample.parts else _run_model
    sizes = {False: (settings.logprob_batch_size, settings.most_logprob_tokens)}
    if trains:
        sizes[True] = (settings.train_micro_batch_size, settings.most_train_tokens)
    for is_training, (num_rows, most_tokens) in sizes.items():
        run(sample, _batch(sample, settings, num_rows, min(num_tokens, most_tokens)), is_training)
        sample.reshard()
    return None


def _needs(sample: BuiltModel) -> tuple[int, int]:
    """Return bytes of a layer, embedding and output layer with their gradients, and bytes of a token's activations."""
    element = sample.compute_dtype.itemsize
    layers = [sum(it.numel() for it in layer.parameters()) for layer in sample.layers]
    outside = sum(it.numel() for _, it in sample.module.hf_parameters()) - sum(layers)
    linears = (it for layer in sample.layers for it in layer.modules() if isinstance(it, nn.Linear))
    widths = sum(it.in_features + it.out_features for it in linears)
    return 2 * element * (max(layers) + outside), 2 * element * widths


def _batch(sample: BuiltModel, settings: PolicySettings, num_rows: int, num_tokens: int) -> TrainBatch:
    """Make a batch of about `num_tokens` tokens.

    torch compiles anew for a single row, and takes sizes that are equal once for equal ever after. So there is one row
    only if the model's passes have one, and no size is one of the model's.
    """
    taken = _sizes(sample)
    by_tokens = settings.sequence_packing.enabled or settings.dynamic_batching.enabled
    if num_rows > 1 or by_tokens:
        num_rows = next(size for size in count(2) if not {size, size + 1} & taken)
    multiple = settings.make_sequence_length_divisible_by
    attention = sample.module.causal_lm.config._attn_implementation
    longest = min(num_tokens // num_rows, settings.max_total_sequence_length, _LONGEST_ROW.get(attention, num_tokens))
    multiples = range(max(longest // multiple, 1) * multiple, 0, -multiple)
    width = next((size for size in multiples if not {size, num_rows * size - 1} & taken), multiples[0])
    lengths = torch.full((num_rows,), width)
    lengths[-1] -= 1  # so that a packed row's longest sequence is no divisor of it
    token_mask = torch.zeros(num_rows, width)
    token_mask[:, -min(_SCORED, width - 1) :] = 1
    return TrainBatch(
        input_ids=torch.zeros(num_rows, width, dtype=torch.int64),
        input_lengths=lengths,
        token_mask=token_mask,
        sample_mask=torch.ones(num_rows),
    )


def _sizes(sample: BuiltModel) -> set[int]:
    """Return all numbers that the code of the model's layers may read."""
    found = {size for parameter in sample.module.parameters() for size in parameter.shape}
    objects = [*sample.module.modules(), sample.module.causal_lm.base_model.config]
    return found | {value for it in objects for value in vars(it).values() if type(value) is int}


def _run_model(sample: BuiltModel, batch: TrainBatch, is_training: bool) -> None:
    """Take the pass of `DTensorBackend`."""
    on_device, rows = sample.on_device(batch)
    if not is_training:
        with sample.reading():
            sample.module(on_device.input_ids, rows, ReadScores())
        return
    sample.module.train()
    scores = sample.module(on_device.input_ids, rows, ReadScores(TokenStat.ENTROPY))
    scores.logprobs.sum().backward()


def _run_layers(sample: BuiltModel, batch: TrainBatch, is_training: bool) -> None:
    """Take the layers' part of a pass of `LayerwisePasses`."""
    model = SteppedModel(sample)
    on_device, rows = sample.on_device(batch)
    units = [cast(FSDPModule, part.unit) for part in sample.parts]
    sample.module.train(is_training)
    with gathered(sample.fsdp_root), model.without_hooks(), torch.set_grad_enabled(is_training):
        with gathered(units[0]):
            given = model.embed(on_device.input_ids, rows)
        for index, unit in enumerate(units[1 : len(sample.layers) + 1]):
            with gathered(unit):
                output = model.layer(index, given.hidden.detach().requires_grad_(is_training), given)
                if is_training:
                    torch.autograd.backward([output], [torch.zeros_like(output)])
                    add_gradients(unit)
