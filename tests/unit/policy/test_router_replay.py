"""Logprobs and gradients of mixtures whose tokens go to given experts, as Hugging Face's with the same ones forced."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    make_settings,
    one_rank_worker,
    worker_of,
)
from routing_cases import forced, random_routing, with_random_routing
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.dtensor.experts import use_grouped_experts
from nemo_offload_rl.backends.dtensor.model import decoder_layers
from nemo_offload_rl.backends.dtensor.replayed_experts import ReplayedExperts
from nemo_offload_rl.data.batch import SampledSequence, collate_samples
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.keys.policy import BatchingConfig, RouterReplayConfig
from nemo_offload_rl.models.families import DTENSOR
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.protocols.backend import ProcessInfo

logger = logging.getLogger(__name__)

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
ON_TRANSFORMER_ENGINE = {
    "bf16": True,
    "pipeline_dtype": "bfloat16",
    "transformer_impl": "transformer_engine",
    "use_precision_aware_optimizer": True,
    "apply_rope_fusion": False,
    "freeze_moe_router": False,
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


def replays_what_an_engine_tells(tmp_path: Path, device: str, forms: dict[str, dict[str, Any]]) -> None:
    """Experts of all tokens but the last, nearly Hugging Face's; each form's logprobs with them are the engine's."""
    script, folder, answers = (
        Path(__file__).parents[2] / "support/routing_engine.py",
        tmp_path / "model",
        tmp_path / "a",
    )
    env = os.environ | vllm_env(device.partition(":")[0])
    subprocess.run([sys.executable, str(script), str(folder), str(answers)], env=env, check=True)
    answered = [(prompt, one) for prompt, group in torch.load(answers, weights_only=False) for one in group]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    same = []
    for prompt, one in answered:
        tokens = torch.tensor([[*prompt, *one.token_ids[:-1]]], device=device)
        with torch.no_grad():
            logits = model(tokens, output_router_logits=True).router_logits
        chosen_TDK = torch.stack([of_layer.topk(4).indices for of_layer in logits], dim=1).cpu()
        told_TDK = torch.from_numpy(one.routed_experts).long()
        assert told_TDK.shape == chosen_TDK.shape
        assert (told_TDK.sort(-1).values.diff(dim=-1) > 0).all()
        same.append((told_TDK.unsqueeze(-1) == chosen_TDK.unsqueeze(-2)).any(-1).double().mean())
    assert sum(same) / len(same) > 0.97
    del model
    sequences = [
        SampledSequence(
            token_ids=[*prompt, *one.token_ids],
            token_mask=[0] * len(prompt) + [1] * len(one.token_ids),
            generation_logprobs=[0.0] * len(prompt) + one.logprobs,
            sample_mask=1.0,
            routed_experts=one.routed_experts,
        )
        for prompt, one in answered
    ]
    batch = collate_samples(sequences, pad_id=256)
    process = ProcessInfo(rank=0, world_size=1, init_method="", device=device)
    for form, changes in forms.items():
        settings = make_settings(folder, **REPLAYS, max_total_sequence_length=400, logprob_batch_size=4, **changes)
        with worker_of(settings, process) as worker:
            worker.prepare_for_lp_inference()
            errors = []
            for rows in (batch, replace(batch, routed_experts=None)):
                gaps = (worker.get_logprobs(rows, counted_only=True) - batch.generation_logprobs).abs()
                errors.append(gaps[batch.token_mask > 0].exp().mean())
            replayed, own = errors
            logger.info("%s: token_mult_prob_error %.5f replayed, %.5f with the policy's choice", form, replayed, own)
            assert replayed < min(own, 1.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.timeout(600)
def test_on_a_gpu_passes_use_the_experts_that_an_engine_told_also_from_its_cache_and_after_preemption(tmp_path):
    packing = BatchingConfig(enabled=True, train_mb_tokens=2048, logprob_mb_tokens=2048, sequence_length_round=1)
    packs = {"precision": "bfloat16", "sequence_packing": packing}
    forms = {
        "DTensor, padded": {"precision": "bfloat16"},
        "DTensor, packed": packs,
        "Megatron, packed": {"backend": "megatron", **packs, **ON_TRANSFORMER_ENGINE},
    }
    replays_what_an_engine_tells(tmp_path, "cuda:0", forms)
