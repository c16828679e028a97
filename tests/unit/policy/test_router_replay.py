"""Logprobs and gradients of mixtures whose tokens go to given experts, as Hugging Face's with the same ones forced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_families import FAMILIES, make_family, trained_by
from policy_cases import (
    NLL,
    assert_equal,
    full_grads,
    full_params,
    hf_logprobs,
    hf_loss_and_grads,
    make_batch,
    one_rank_worker,
)
from routing_cases import forced, random_routing, with_random_routing
from torch.testing import assert_close

from nemo_offload_rl.backends.dtensor.experts import use_grouped_experts
from nemo_offload_rl.backends.dtensor.model import decoder_layers
from nemo_offload_rl.backends.dtensor.replayed_experts import ReplayedExperts
from nemo_offload_rl.keys.policy import BatchingConfig, RouterReplayConfig
from nemo_offload_rl.models.families import DTENSOR
from nemo_offload_rl.models.shape import ModelShape

REPLAYS = {"router_replay": RouterReplayConfig(enabled=True)}
PACKS = {
    "sequence_packing": BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=40, sequence_length_round=1)
}
PADS = {"train_micro_batch_size": 3, "logprob_batch_size": 3}
FORMS = {
    "padded": PADS,
    "recomputed": {**PADS, "activation_checkpointing": True},
    "packed": PACKS,
    "recomputed and packed": {**PACKS, "activation_checkpointing": True},
}
MIXTURES = [name for name, (_, sizes) in FAMILIES.items() if ModelShape.of({"model_type": "", **sizes}).num_experts]


def _is_of_router(name):
    return "router." in name or ".gate." in name


@pytest.mark.parametrize("family", [name for name in MIXTURES if DTENSOR in trained_by(name)])
def test_every_family_takes_given_experts_and_weighs_them_as_its_own_choice(family):
    model = make_family(family, seed=0)
    shape = ModelShape.of(model.config.to_dict())
    batch = make_batch(num_rows=2)
    layers = decoder_layers(model)
    routing = random_routing(batch, len(layers), shape.num_experts, shape.num_active_experts)
    batch = replace(batch, routed_experts=routing)
    mixtures = [index for index, layer in enumerate(layers) if any(map(_is_of_router, dict(layer.named_parameters())))]
    with torch.no_grad():
        own = hf_logprobs(model, batch)
        with forced(batch, mixtures, shape.num_experts):
            expected = hf_logprobs(model, batch)
        use_grouped_experts(model)
        replayed = ReplayedExperts(layers, model.config)
        replayed.use(routing.flatten(0, 1))
        assert_close(hf_logprobs(model, batch), expected, rtol=1e-4, atol=1e-4)
        assert (own - expected).abs().max() > 0.1
        replayed.use(None)
        assert_close(hf_logprobs(model, batch), own, rtol=1e-4, atol=1e-4)


def expected(model, batch):
    """Logprobs, loss and gradients of Hugging Face's forward with the batch's routing."""
    with forced(batch, [0, 1], model.config.num_experts):
        return hf_logprobs(model, batch).detach(), *hf_loss_and_grads(model, batch)


@pytest.mark.parametrize(
    ("backend", "form"), [*(("dtensor", form) for form in FORMS), ("megatron", "padded"), ("megatron", "recomputed")]
)
def test_passes_send_tokens_to_the_experts_of_the_batch(folders, backend, form):
    folder, model = folders("qwen3-moe")
    batch = with_random_routing(make_batch(), model.config)
    with torch.no_grad():
        own = hf_logprobs(model, batch)
    logprobs, loss, grads = expected(model, batch)
    changes = FORMS[form] | ({"freeze_moe_router": False} if backend == "megatron" else {})
    with one_rank_worker(folder, backend=backend, keep_reference=True, **REPLAYS, **changes) as worker:
        worker.prepare_for_lp_inference()
        assert_close(worker.get_logprobs(batch), logprobs)
        assert_close(worker.get_reference_logprobs(batch), own)
        assert_close(worker.get_logprobs(replace(batch, routed_experts=None)), own)
        worker.prepare_for_training()
        for _ in range(2):  # the second pass repeats the first
            assert worker.forward_backward(batch, NLL())[0] == pytest.approx(loss, rel=1e-5)
            found = full_grads(worker)
            for name, grad in grads.items():
                assert_close(found[name], grad, rtol=1e-3, atol=1e-5)
            worker.zero_grad()


def test_layer_by_layer_the_steps_are_bit_by_bit_those_of_a_model_on_the_device(folders):
    folder, model = folders("qwen3-moe")
    batch = with_random_routing(make_batch(), model.config)
    found = []
    for changes in ({}, {"cpu_offload": True}):
        with one_rank_worker(folder, **REPLAYS, **FORMS["recomputed and packed"], **changes) as worker:
            worker.prepare_for_lp_inference()
            logprobs = worker.get_logprobs(batch)
            worker.prepare_for_training()
            result = worker.train(batch, NLL())
            found.append({"logprobs": logprobs, "norm": torch.tensor(result.grad_norm), **full_params(worker)})
    assert_equal(*found)
