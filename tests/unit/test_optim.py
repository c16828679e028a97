"""AdamW with moments of 16 bits, beside torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nemo_offload_rl import optim
from nemo_offload_rl.optim import AdamW, hashed, round_by_chance_

IN_FP32 = {"exp_avg_dtype": "float32", "exp_avg_sq_dtype": "float32"}
NUM_STEPS = 400
on_each_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ],
)


def train(optimizer_class, value: Tensor, gradients, **kwargs) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameter and its moments after a step with each of the gradients."""
    parameter = nn.Parameter(value.clone())
    optimizer = optimizer_class([parameter], lr=1e-3, weight_decay=0.1, **kwargs)
    for gradient in gradients:
        parameter.grad = gradient.to(value.device, copy=True)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def gradients_that_shrink(shape: tuple[int, ...], generator: torch.Generator, num_steps: int = NUM_STEPS):
    for step in range(num_steps):
        yield torch.randn(shape, generator=generator) * (1.0 if step < num_steps // 4 else 0.01)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def both(device: str, num_steps: int, shape=(64, 128), **kwargs):
    """torch's and ours with the same gradients."""
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    value = drawn(shape).to(device)
    theirs = train(torch.optim.AdamW, value, gradients_that_shrink(shape, seeds[0], num_steps), fused=True)
    return theirs, train(AdamW, value, gradients_that_shrink(shape, seeds[1], num_steps), fused=True, **kwargs)


@on_each_device
def test_with_moments_of_32_bits_it_is_torchs_bit_by_bit(device):
    (theirs, their_state), (ours, our_state) = both(device, 5, **IN_FP32)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(our_state[name].cpu(), their_state[name].cpu()) for name in their_state)


@on_each_device
def test_with_moments_of_16_bits_it_stays_beside_torchs_also_where_gradients_shrink(device):
    (theirs, their_state), (ours, our_state) = both(device, NUM_STEPS)
    assert {our_state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    second = our_state["exp_avg_sq"].double() / their_state["exp_avg_sq"].double() - 1
    # Of one element a walk by chance of half a unit in the last of 8 bits a step; no drift of all.
    assert second.std() < 0.05 and second.mean().abs() < 0.002
    first = (our_state["exp_avg"].float() - their_state["exp_avg"]).norm() / their_state["exp_avg"].norm()
    assert first < 0.01
    moved = (theirs - drawn((64, 128)).to(device)).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_rounded_to_the_nearest_a_second_moment_would_not_shrink():
    """Why moments are rounded by chance."""
    nearest = torch.ones(1000, dtype=torch.bfloat16)
    by_chance = nearest.clone()
    for step in range(1000):
        nearest.copy_(nearest.float() * 0.999)
        value = by_chance.float() * 0.999
        round_by_chance_(value, hashed(drawn((1000,), seed=step), value, step))
        by_chance.copy_(value)
    assert torch.equal(nearest, torch.ones(1000, dtype=torch.bfloat16))
    assert by_chance.float().mean() == pytest.approx(0.999**1000, rel=0.01)


@pytest.mark.parametrize("scale", [1.0, -1.0, 3e-12])
def test_rounding_goes_to_one_of_the_two_neighbours_and_is_right_on_average(scale):
    values = drawn((1 << 16,)).abs() * scale
    rounded = values.clone()
    round_by_chance_(rounded, hashed(values, drawn((1 << 16,), seed=1), 7))
    kept = rounded.bfloat16()
    assert torch.equal(kept.float(), rounded)
    unit = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)  # towards zero
    assert (((rounded - values).abs() < 2**-7 * values.abs()) | (rounded == unit)).all()
    relative = ((rounded - values) / values).double()
    assert relative.mean().abs() < 4 * relative.std() / 256
    exact = kept.float()
    round_by_chance_(exact, hashed(exact, exact, 3))
    assert torch.equal(exact, kept.float())
    zeros = torch.zeros(8)
    round_by_chance_(zeros, torch.full((8,), -1, dtype=torch.int32))
    assert torch.equal(zeros, torch.zeros(8))


@pytest.mark.parametrize("low_bits", [0, 1, 0x7FFF, 0xFFFF])
def test_rounding_leaves_nan_and_infinities_and_keeps_what_is_finite_finite(low_bits):
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38, largest, -largest, torch.nan])
    odd_nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    rounded = torch.cat([values, odd_nans])
    assert rounded.isnan().sum() == 4
    round_by_chance_(rounded, torch.full((10,), low_bits, dtype=torch.int32))
    assert rounded[:6].tolist() == [torch.inf, -torch.inf, largest, -largest, largest, -largest]
    assert rounded[6:].isnan().all() and rounded[6:].bfloat16().isnan().all()


def test_a_value_that_comes_again_is_rounded_otherwise_in_another_step():
    value = torch.full((1,), 1.2345e-5)
    results = []
    for step in range(4000):
        rounded = value.clone()
        round_by_chance_(rounded, hashed(value, torch.zeros(1), step))
        results.append(float(rounded))
    assert len(set(results)) == 2
    assert sum(results) / len(results) == pytest.approx(float(value), rel=1e-4)


@on_each_device
def test_the_update_of_an_element_is_the_same_in_any_shard_and_piece(device, monkeypatch):
    value, gradients = drawn((40, 8)).to(device), [drawn((40, 8), seed=seed) for seed in range(4)]
    whole, state = train(AdamW, value, gradients)
    monkeypatch.setattr(optim, "PIECE_ELEMENTS", 50)
    for rows in (slice(0, 24), slice(24, 40)):
        shard, of_shard = train(AdamW, value[rows], [gradient[rows] for gradient in gradients])
        assert torch.equal(shard, whole[rows])
        assert all(torch.equal(of_shard[name], state[name][rows]) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"lr": -1.0}, "lr is -1.0, below 0"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"exp_avg_sq_dtype": "float16"}, "exp_avg_sq_dtype is float16, not one of float32, bfloat16"),
        ({"exp_avg_dtype": "uint8"}, "exp_avg_dtype is uint8"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs, reason):
    with pytest.raises(ValueError, match=reason):
        AdamW([nn.Parameter(torch.ones(2))], **kwargs)
