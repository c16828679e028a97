"""Workers with adapters, of either backend."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from policy_cases import ONE_RANK, full, full_params, is_megatron, make_settings, worker_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nemo_offload_rl.keys.engine import ServedAdapters
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo

BFLOAT16 = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}
DIM, ALPHA = 4, 8
SERVED = ServedAdapters(
    max_rank=8,
    modules=("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
MARKERS = {"dtensor": ".lora_", "megatron": ".adapter."}  # in the name of every adapter's parameter, and of no other


def lora_worker(
    folder: Path | str,
    backend: str,
    *,
    process: ProcessInfo = ONE_RANK,
    keep_reference: bool = False,
    lora: dict[str, Any] | None = None,
    **changes: Any,
) -> AbstractContextManager[PolicyWorker]:
    """A worker of `lora_settings`."""
    return worker_of(lora_settings(folder, backend, lora, **changes), process, keep_reference=keep_reference)


def lora_settings(
    folder: Path | str, backend: str, lora: dict[str, Any] | None = None, **changes: Any
) -> PolicySettings:
    """Settings with adapters; `lora` replaces keys of `lora_cfg` or `peft`, `changes` those of the policy."""
    settings = make_settings(folder, backend=backend, **changes)
    wanted = {"enabled": True, "dim": DIM, "alpha": ALPHA, **(lora or {})}
    if settings.megatron_cfg is not None:
        section = settings.megatron_cfg
        settings = replace(settings, megatron_cfg=replace(section, peft=replace(section.peft, **wanted)))
    else:
        section = settings.dtensor_cfg
        settings = replace(settings, dtensor_cfg=replace(section, lora_cfg=replace(section.lora_cfg, **wanted)))
    return settings


def values_of(worker: PolicyWorker) -> dict[str, Tensor]:
    """A copy of every parameter of a Megatron model, and of the trained ones of a DTensor model, whatever the phase."""
    if not is_megatron(worker):
        return full_params(worker)
    (chunk,) = worker._backend._chunks
    with worker.residency.checkpoint_view():
        return {name: full(parameter) for name, parameter in chunk.module.named_parameters()}


def merged_by_peft(model: Path, adapter: Path, base_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of a model, rounded to `base_dtype`, with the exported adapters, loaded and merged by peft in float32."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=base_dtype).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of missing keys
        loaded = PeftModel.from_pretrained(base, adapter)
    return {name: value.detach() for name, value in loaded.merge_and_unload().named_parameters()}


def adapters_of(worker: PolicyWorker) -> dict[str, Tensor]:
    """A copy of the adapters, whatever the phase."""
    marker = MARKERS["megatron" if is_megatron(worker) else "dtensor"]
    return {name: value for name, value in values_of(worker).items() if marker in name}


def random_adapters(model: Any, seed: int) -> dict[str, Tensor]:
    """Adapters of rank 4 for every linear layer but the output layer, as a policy sends them."""
    draws, sent = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():
            sent[f"{name}.lora_A.weight"] = 0.1 * torch.randn(4, layer.in_features, generator=draws)
            sent[f"{name}.lora_B.weight"] = 0.1 * torch.randn(layer.out_features, 4, generator=draws)
    return sent


@torch.no_grad()
def merged(model: Any, adapters: dict[str, Tensor]) -> Any:
    """A copy of a model with the adapters of `random_adapters` merged into its weights."""
    model = copy.deepcopy(model)
    for name, first in adapters.items():
        layer, is_first, _ = name.partition(".lora_A.")
        if is_first:
            model.get_submodule(layer).weight += adapters[f"{layer}.lora_B.weight"] @ first
    return model
