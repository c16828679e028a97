"""Small states in joined storages: no value changes, nor does any later step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nemo_offload_rl.backends.megatron.upstream import storages as upstream_storages
from nemo_offload_rl.backends.megatron.upstream.storages import join_states
from nemo_offload_rl.residency import unique_storages

SHAPES = [(64, 33), (7,), (33, 64), (1, 1), (5, 3, 2), (64, 33)]


def trained(optimizer_class, steps, model=None, optimizer=None):
    """A few weights after some steps, and their optimizer; gradients are those of the count of steps."""
    if model is None:
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        optimizer = optimizer_class(model.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def states_of(optimizer):
    return [
        (f"{number}/{key}", value)
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim()
    ]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("joined_bytes", [1 << 20, 20_000])
def test_states_share_storages_and_every_later_step_has_the_same_bits(monkeypatch, optimizer_class, joined_bytes):
    monkeypatch.setattr(upstream_storages, "JOINED_BYTES", joined_bytes)
    model, optimizer = trained(optimizer_class, 2)
    alone = trained(optimizer_class, 2, *copy.deepcopy((model, optimizer)))[0]
    before = {name: value.clone() for name, value in states_of(optimizer)}
    assert join_states(optimizer, model.parameters())
    after = dict(states_of(optimizer))
    assert all(torch.equal(before[name], after[name]) for name in before)
    storages = unique_storages(after.items())
    assert len(storages) < len(after) / 2
    assert (len(storages) == 1) == (joined_bytes > 20_000)
    assert max(record.storage.nbytes() for record in storages.values()) <= joined_bytes
    trained(optimizer_class, 2, model, optimizer)
    assert all(torch.equal(mine, other) for mine, other in zip(model, alone, strict=True))
    assert all(after[name] is value for name, value in states_of(optimizer))


def test_large_states_counts_and_what_has_no_state_yet_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(upstream_storages, "SMALL_BYTES", 64 * 33 * 4)
    model, optimizer = trained(torch.optim.AdamW, 1)
    new = nn.Parameter(torch.zeros(3))
    large, count = optimizer.state[model[0]]["exp_avg"], optimizer.state[model[1]]["step"]
    assert join_states(optimizer, [*model, new])
    assert optimizer.state[model[0]]["exp_avg"] is large
    assert optimizer.state[model[1]]["step"] is count
    assert new not in optimizer.state
    assert not join_states(optimizer, [new])
