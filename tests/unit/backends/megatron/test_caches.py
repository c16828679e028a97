"""After clearing, nothing that a pass made is left in megatron-core's caches; the next pass gives the same numbers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gpt import TinyGpt, process_group, tiny_gpt

from nemo_offload_rl.backends.megatron.upstream import caches

RESIDENT = {"fine_grained_activation_offloading": False, "offload_modules": []}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, **RESIDENT}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with process_group():
        yield


def dispatchers(gpt: TinyGpt) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [module.token_dispatcher for module in gpt.model.modules() if isinstance(module, MoELayer)]


def held(owner: Any) -> set[str]:
    return {name for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}


def test_rotary_embeddings_of_every_length_are_freed() -> None:
    with tiny_gpt(**RESIDENT) as gpt:
        caches.clear_rotary_caches([gpt.model])
        before = gpt.run([16, 24, 32])
        forward = type(gpt.model.rotary_pos_emb).forward
        assert forward.cache_info().currsize == 3
        caches.clear_rotary_caches([gpt.model])
        assert forward.cache_info().currsize == 0
        gpt.grads()
        assert gpt.run([16, 24, 32]) == before


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_dispatchers_keep_only_what_they_were_made_with(kind: str) -> None:
    with tiny_gpt(**EXPERTS, moe_token_dispatcher_type=kind) as gpt:
        made_with = [held(dispatcher) for dispatcher in dispatchers(gpt)]
        assert len(made_with) == 3
        losses = gpt.run([16, 16])
        grads = gpt.grads()
        assert all(held(dispatcher) > names for dispatcher, names in zip(dispatchers(gpt), made_with, strict=True))
        caches.clear_dispatchers([gpt.model])
        assert [held(dispatcher) for dispatcher in dispatchers(gpt)] == made_with
        assert gpt.run([16, 16]) == losses
        again = gpt.grads()
        assert all(torch.equal(again[name], grad) for name, grad in grads.items())


def test_no_tensor_of_a_pass_outlives_the_clearing() -> None:
    def tensors() -> set[int]:
        gc.collect()
        return {id(found) for found in gc.get_objects() if isinstance(found, torch.Tensor)}

    with tiny_gpt(**EXPERTS) as gpt:
        caches.clear_memory_caches([gpt.model])
        before = tensors()
        gpt.run([16, 24])
        gpt.grads()
        kept = len(tensors() - before)
        caches.clear_memory_caches([gpt.model])
        assert kept > 0
        assert tensors() - before == set()


def test_a_cache_that_a_release_no_longer_has_is_an_error_and_not_ignored() -> None:
    with pytest.raises(TypeError, match="no longer keeps a cache"):
        caches._cache_of(len)


@pytest.mark.gpu
def test_transformer_engines_workspaces_are_freed_and_made_again() -> None:
    engine = pytest.importorskip("transformer_engine.pytorch")
    device = torch.device("cuda")
    layer = engine.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16, device=device)
    inputs = torch.randn(64, 1024, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        expected = layer(inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        caches.clear_workspaces()
        assert before - torch.cuda.memory_allocated() >= 32 << 20
        assert torch.equal(layer(inputs), expected)


@pytest.mark.gpu
def test_eight_bit_copies_of_weights_are_freed_and_made_again() -> None:
    engine = pytest.importorskip("transformer_engine.pytorch")
    recipe = pytest.importorskip("transformer_engine.common.recipe")
    device = torch.device("cuda")
    layer = engine.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16, device=device)
    inputs = torch.randn(64, 1024, dtype=torch.bfloat16, device=device)

    def forward(is_first: bool) -> torch.Tensor:
        with torch.no_grad(), engine.fp8_autocast(enabled=True, fp8_recipe=recipe.Float8CurrentScaling()):
            return layer(inputs, is_first_microbatch=is_first)

    expected = forward(True)
    before = torch.cuda.memory_allocated()
    caches.clear_fp8_caches([layer])
    assert before - torch.cuda.memory_allocated() >= 1024 * 1024
    assert torch.equal(forward(False), expected)
