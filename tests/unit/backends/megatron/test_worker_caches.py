"""`clear_memory_caches_before_refit` through the worker's verbs, and caches after its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_cpu_shim import megatron_on_cpu
from policy_cases import NLL, make_batch, make_settings
from tiny_models import qwen3_config, save_model_folder

from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo


def num_rotary_lengths() -> int:
    """How many lengths of rotary embeddings this process keeps."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    forward: Any = RotaryEmbedding.forward
    return forward.cache_info().currsize


def step(worker: PolicyWorker) -> tuple[list[float], int]:
    """One step up to the refit; its losses, and how many lengths of rotary embeddings are kept then."""
    worker.prepare_for_training()
    losses = worker.train(make_batch(), NLL()).loss
    worker.offload_before_refit()
    kept = num_rotary_lengths()
    worker.offload_after_refit()
    return losses, kept


@pytest.mark.parametrize("clears", [True, False])
def test_caches_are_empty_at_a_refit_only_where_it_is_asked_for(tmp_path: Path, clears: bool) -> None:
    save_model_folder(tmp_path, 0, qwen3_config())
    settings = make_settings(tmp_path, backend="megatron", clear_memory_caches_before_refit=clears)
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
    with megatron_on_cpu():
        worker = PolicyWorker(settings, process, keep_reference=False)
        first, second = step(worker), step(worker)
        worker.shutdown()
        assert num_rotary_lengths() == 0  # a worker that has ended leaves none to the next
    assert (first[1] > 0, second[1] > 0) == (not clears, not clears)
    assert second[0] != first[0]
