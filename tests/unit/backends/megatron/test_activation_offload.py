"""What megatron-core's activation offloading does in the passes of a policy worker, with and without the guard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_cases import make_settings

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gpt import TinyGpt, process_group, tiny_gpt

from nemo_offload_rl.backends.megatron.activation_offload import (
    ActivationOffloading,
    check_modules,
    check_transformer_engine,
    elements_a_token,
    host_bytes_at_most,
)
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.keys.worker import PolicySettings

CPU = torch.device("cpu")
# Attention of local layers keeps transposed views, megatron-core brings contiguous tensors back, and on some CPUs
# matrix products round by layout.
ROUNDING = 1e-6


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with process_group():
        yield


def guard_of(gpt: TinyGpt, limit_bytes: int = 1 << 30) -> ActivationOffloading:
    return ActivationOffloading([gpt.model.config, gpt.model.decoder.config], limit_bytes, CPU)


def train(gpt: TinyGpt, guard: ActivationOffloading, lengths: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    with guard.training_pass(len(lengths)):
        losses = gpt.run(lengths)
    return losses, gpt.grads()


def assert_same_grads(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grads[name] - grad).abs().max() <= tolerance * grad.abs().max(), name


def logprob_pass(gpt: TinyGpt) -> None:
    gpt.model.eval()
    with torch.no_grad():
        gpt.run([16, 16], forward_only=True)
    gpt.model.train()


def test_without_the_guard_a_pass_of_logprobs_consumes_the_warm_up() -> None:
    """The hazard itself, so that a release of megatron-core without it is noticed."""
    with tiny_gpt() as gpt:
        gpt.run([16, 16])
        gpt.copies.drain()
        gpt.run([16, 16])
        full = gpt.copies.drain()
    with tiny_gpt() as gpt:
        logprob_pass(gpt)
        gpt.run([16, 16])
        gpt.copies.drain()
        gpt.run([16, 16])
        lost = gpt.copies.drain()
    assert full == (72, 124_928)
    assert lost[1] < 0.1 * full[1]


def test_with_the_guard_forward_only_passes_change_nothing_about_training() -> None:
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        for _ in range(2):
            with guard.forward_only():
                logprob_pass(gpt)
        assert gpt.copies.drain() == (0, 0)
        train(gpt, guard, [16, 16])
        warm_up = gpt.copies.drain()
        with guard.forward_only():
            logprob_pass(gpt)
            with guard.forward_only():
                logprob_pass(gpt)
        assert gpt.copies.drain() == (0, 0)
        train(gpt, guard, [16, 16])
        assert warm_up == (108, 187_392)
        assert gpt.copies.drain() == (72, 124_928)


def test_a_forward_only_pass_that_keeps_a_graph_moves_nothing_either() -> None:
    """Evaluation in training mode without no_grad would warm up on the wrong lists."""
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        with guard.forward_only():
            gpt.run([16, 16], forward_only=True)
        assert gpt.copies.drain() == (0, 0)
        train(gpt, guard, [16, 16])
        gpt.copies.drain()
        train(gpt, guard, [16, 16])
        assert gpt.copies.drain() == (72, 124_928)


def test_more_micro_batches_than_the_warm_up_had_are_offloaded_too() -> None:
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        train(gpt, guard, [16])
        train(gpt, guard, [16] * 4)
        gpt.copies.drain()
        train(gpt, guard, [16] * 4)
        assert gpt.copies.drain() == (4 * 36, 4 * 62_464)
    with tiny_gpt() as gpt:  # and without the guard they are not
        gpt.run([16])
        gpt.run([16] * 4)
        gpt.copies.drain()
        gpt.run([16] * 4)
        assert gpt.copies.drain()[0] < 2 * 36


def test_fewer_micro_batches_do_not_warm_up_again() -> None:
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        train(gpt, guard, [16] * 3)
        train(gpt, guard, [16])
        gpt.copies.drain()
        train(gpt, guard, [16] * 3)
        assert gpt.copies.drain() == (3 * 36, 3 * 62_464)


@pytest.mark.parametrize(
    ("modules", "tolerance"),
    [
        (["attn_norm", "qkv_linear"], 0.0),
        (["core_attn", "attn_proj"], ROUNDING),
        # Its extra node in the graph changes the order in which the residual's three gradients are added.
        (["mlp_norm"], 1e-6),
    ],
)
def test_losses_and_gradients_are_those_without_offloading(modules: list[str], tolerance: float) -> None:
    batches = [[16, 24], [24, 8, 16], [16]]
    with tiny_gpt(fine_grained_activation_offloading=False, offload_modules=[]) as gpt:
        guard = guard_of(gpt)
        assert not guard.is_enabled
        expected = [train(gpt, guard, lengths) for lengths in batches]
        assert gpt.copies.drain() == (0, 0)
    with tiny_gpt(offload_modules=modules) as gpt:
        guard = guard_of(gpt)
        for (losses, grads), lengths in zip(expected, batches, strict=True):
            with guard.forward_only():
                logprob_pass(gpt)
            offloaded_losses, offloaded_grads = train(gpt, guard, lengths)
            assert gpt.copies.drain()[0] > 0
            assert offloaded_losses == losses
            assert_same_grads(offloaded_grads, grads, tolerance)


def test_an_exception_in_a_forward_only_pass_leaves_offloading_on() -> None:
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        train(gpt, guard, [16, 16])
        gpt.copies.drain()
        with pytest.raises(ZeroDivisionError), guard.forward_only():
            raise ZeroDivisionError
        train(gpt, guard, [16, 16])
        assert gpt.copies.drain() == (72, 124_928)


@pytest.mark.parametrize("passes_before", [0, 1])
def test_after_a_training_pass_that_raised_the_next_one_is_whole(passes_before: int) -> None:
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        for _ in range(passes_before):
            train(gpt, guard, [16, 16])
        hook = gpt.model.decoder.layers[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(gpt, guard, [16, 16])
        hook.remove()
        gpt.grads()
        losses, grads = train(gpt, guard, [16, 16])
        gpt.copies.drain()
        again, grads_again = train(gpt, guard, [16, 16])
        assert gpt.copies.drain() == (72, 124_928)
        assert losses == again
        assert_same_grads(grads_again, grads, ROUNDING)  # the first one keeps what the last layer needs


def test_host_memory_is_bounded_under_changing_lengths() -> None:
    """Megatron-core's pool keeps every shape; ours serves other shapes from the same memory."""
    lengths = [[n, n + 1] for n in range(8, 40, 2)]
    with tiny_gpt() as gpt:
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

        for pair in lengths:
            gpt.run(pair)
        pool = PipelineOffloadManager.get_instance().cpu_tensor_pool
        upstream = {key: len(entry["all"]) for key, entry in pool._pools.items()}
    with tiny_gpt() as gpt:
        guard = guard_of(gpt)
        train(gpt, guard, lengths[-1])
        after_one = guard.host_bytes
        for pair in lengths:
            train(gpt, guard, pair)
        assert guard.host_bytes == after_one
        guard.close()
        assert guard.host_bytes == 0
        train(gpt, guard, [16, 16])
        assert guard.host_bytes > 0
    assert len(upstream) > 60, "megatron-core keeps buffers for each shape"


def sizes_of(modules: tuple[str, ...], **changes: Any) -> tuple[PolicySettings, MegatronConfig]:
    changes = {"precision": "bfloat16", "activation_offload_host_limit_gib": 64.0, **changes}
    settings = make_settings("a-model", backend="megatron", offload_modules=modules, **changes)
    assert settings.megatron_cfg is not None
    return settings, settings.megatron_cfg


QWEN3_1_7B = SimpleNamespace(hidden_size=2048, num_attention_heads=16, num_query_groups=8, kv_channels=128)
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
LONG = {"max_total_sequence_length": 32768, "train_micro_batch_size": 1}


def test_what_moves_is_within_what_is_expected_and_not_far_below() -> None:
    """With 16-bit numbers in place of the tiny model's 32-bit ones; core_attn of local layers keeps all scores."""
    modules = ("attn_norm", "qkv_linear", "mlp_norm")
    with tiny_gpt(offload_modules=list(modules), min_offloaded_tensor_size=600) as gpt:
        guard = guard_of(gpt)
        train(gpt, guard, [40])
        gpt.copies.drain()
        train(gpt, guard, [40])
        moved_bytes = gpt.copies.drain()[1] / 2
        layers = len(gpt.model.decoder.layers)
        settings, cfg = sizes_of(modules, max_total_sequence_length=40, train_micro_batch_size=1)
        expected = [elements for module in modules for elements in elements_a_token(gpt.model.config, module, cfg)]
        assert 0.4 < moved_bytes / (2 * 40 * layers * sum(expected)) <= 1
        assert guard.host_bytes <= host_bytes_at_most(gpt.model.config, layers, settings, cfg)


def test_host_memory_that_activations_need_follows_tokens_layers_and_modules() -> None:
    def gib(modules: tuple[str, ...] = ATTENTION, layers: int = 28, **changes: Any) -> float:
        return host_bytes_at_most(QWEN3_1_7B, layers, *sizes_of(modules, **LONG | changes)) / 2**30

    # By hand: 2 * 2048 + 16 * 128 + 8 * 128 elements, 2 * (16 + 8) * 128 + 32, and 16 * 128, of 2 bytes.
    assert gib(("qkv_linear",)) == pytest.approx(1.5 * 28 * 32768 * 7168 * 2 / 2**30, rel=1e-3)
    assert gib() == pytest.approx(1.5 * 28 * 32768 * (7168 + 6176 + 2048) * 2 / 2**30, rel=1e-2)
    for changes in ({"max_total_sequence_length": 16384}, {"context_parallel_size": 2}, {"layers": 14}):
        assert gib(**changes) == pytest.approx(gib() / 2, rel=1e-2)
    assert gib(activation_offload_fraction=0.5) == gib(layers=14)
    assert gib(layers=14, pipeline_model_parallel_size=2) == gib()
    assert gib(tensor_model_parallel_size=2, sequence_parallel=True) == pytest.approx(gib() / 2, rel=1e-2)
    packed = BatchingConfig(enabled=True, train_mb_tokens=8192, logprob_mb_tokens=1, sequence_length_round=1)
    assert gib(max_total_sequence_length=4096, train_micro_batch_size=8, sequence_packing=packed) == pytest.approx(
        gib() / 4, rel=1e-2
    )


def test_no_more_host_memory_is_expected_than_the_limit() -> None:
    def gib(**changes: Any) -> float:
        return host_bytes_at_most(QWEN3_1_7B, 28, *sizes_of(ATTENTION, **LONG | changes)) / 2**30

    assert gib() < 64
    assert gib(activation_offload_host_limit_gib=2.0) == 2
    # Attention keeps a matrix of scores there, which grows with the square of the length.
    assert gib(precision="float32") == 64


def test_offloading_without_transformer_engine_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="Transformer Engine is not installed; install it"):
        check_transformer_engine()


def test_a_name_that_stands_for_nothing_in_the_model_is_refused() -> None:
    names = ["core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear"]
    with tiny_gpt(offload_modules=[*names, "expert_fc1"]) as gpt:
        check_modules([gpt.model], names)
        with pytest.raises(ConfigError, match="offload_modules has expert_fc1, but no layer of this model"):
            check_modules([gpt.model], [*names, "expert_fc1"])


def test_a_norm_that_is_fused_into_the_product_behind_it_is_refused() -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    with tiny_gpt(offload_modules=["attn_norm"]) as gpt:
        for layer in gpt.model.decoder.layers:
            layer.input_layernorm = IdentityOp()  # as Transformer Engine's layers have it
            layer._set_offload_modules()
        with pytest.raises(ConfigError, match="offload_modules has attn_norm"):
            check_modules([gpt.model], ["attn_norm"])
