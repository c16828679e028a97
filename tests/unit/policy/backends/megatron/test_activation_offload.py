"""What megatron-core's activation offloading does in the passes of a policy worker, with and without the guard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_gpt import TinyGpt, process_group, tiny_gpt

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.megatron.activation_offload import (
    ActivationOffloading,
    check_modules,
    check_transformer_engine,
)

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
