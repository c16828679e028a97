"""Every family that is trained: import, one step of training, refit, and what vLLM answers with the new weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from engine_process import EngineProcess, engine_process, engine_settings, send_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import FAMILIES, checkpoint_tensors, save_family_folder, trained_by
from policy_cases import NLL, full_params, make_batch, one_rank_worker
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.generation.interfaces import Completion, SamplingSettings
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.refit import refit

TIED = ("granite-tied", "llama-tied", "qwen2-tied", "qwen3-tied", "qwen3_moe-tied")
TRAINED = {family: trained_by(family) for family in (*FAMILIES, *TIED)}
"""Backends that train a family."""
GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0)
# vLLM's cache blocks hold 128 tokens on CPU: the last two prompts fill one and two of them.
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 60, 140, 300)]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process() as process:
        yield process


@torch.no_grad()
def assert_answers_like(engine: EngineProcess, model: torch.nn.Module) -> list[Completion]:
    """Greedy tokens are Hugging Face's, and their logprobs."""
    answers = [samples[0] for samples in engine.generate(PROMPTS, GREEDY)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        assert answer.token_ids == logits.argmax(-1).tolist()
        assert_close(torch.tensor(answer.logprobs), logits.log_softmax(-1).max(-1).values)
    return answers


def as_batch(answers: Sequence[Completion]) -> TokenBatch:
    """Prompts and answers in rows, padded."""
    rows = [prompt + answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [256] * (width - len(row)) for row in rows])
    return TokenBatch(input_ids=ids, input_lengths=torch.tensor([len(row) for row in rows]))


def hf_model(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> torch.nn.Module:
    """Hugging Face's model with these tensors, all of them and no others."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.float().eval()


@pytest.mark.parametrize("family", list(TRAINED))
def test_greedy_tokens_after_training_and_refit_are_those_of_the_new_weights(
    engine: EngineProcess, tmp_path: Path, family: str
) -> None:
    before = checkpoint_tensors(save_family_folder(tmp_path / "model", family))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    engine.start(engine_settings(tmp_path / "model"))
    for backend in TRAINED[family]:
        sizes = {"max_total_sequence_length": 400, "logprob_batch_size": 4}
        with one_rank_worker(tmp_path / "model", backend=backend, **sizes) as worker:
            worker.prepare_for_training()
            assert worker.train(make_batch(), NLL()).grad_norm[0] > 0
            weights = full_params(worker)
            assert weights.keys() == before.keys()
            moved = {name for name, tensor in weights.items() if not torch.equal(tensor, before[name])}
            # The Megatron backend leaves routers as they are, unless it is told otherwise.
            assert {name for name in before if name not in moved} == {name for name in before if ".mlp.gate." in name}
            refit(worker, engine)
            model = hf_model(tmp_path / backend, config, weights)
            answers = assert_answers_like(engine, model)
            worker.prepare_for_lp_inference()
            logprobs = worker.get_logprobs(as_batch(answers))
            for row, prompt, answer in zip(logprobs, PROMPTS, answers, strict=True):
                assert_close(torch.tensor(answer.logprobs), row[len(prompt) : len(prompt) + len(answer.token_ids)])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2-tied"])
def test_a_refit_of_any_order_and_buckets_is_whole_or_names_what_it_lacks(
    engine: EngineProcess, tmp_path: Path, family: str
) -> None:
    models = [save_family_folder(tmp_path, family, seed) for seed in range(2)]
    engine.start(engine_settings(tmp_path))
    names = list(checkpoint_tensors(models[0]))
    runs = []

    @settings(max_examples=40, derandomize=True)
    @given(
        order=st.permutations(names),
        missing=st.sets(st.sampled_from(names), max_size=3),
        buffer_bytes=st.sampled_from([1, 5_000, 70_000, 2**30]),
    )
    def refits(order: list[str], missing: set[str], buffer_bytes: int) -> None:
        # Weights of the other model than before, so that what is not written shows.
        model = models[len(runs) % 2]
        runs.append(missing)
        tensors = checkpoint_tensors(model)
        sent = {name: tensors[name] for name in order if name not in missing}
        if not missing:
            send_weights(engine, sent, buffer_bytes)
            assert_answers_like(engine, model)
            return
        with pytest.raises(RefitError) as raised:
            send_weights(engine, sent, buffer_bytes)
        assert f"as they were: {', '.join(sorted(missing))}. The policy" in str(raised.value)
        with pytest.raises(RuntimeError, match="before a refit"):
            engine.generate(PROMPTS, GREEDY)

    refits()
    assert any(runs) and not all(runs)


STRANGE = [
    ("model.layers.0.mlp.experts.4.up_proj.weight", lambda _: torch.zeros(48, 64)),
    ("model.layers.0.self_attn.q_proj.bias", lambda _: torch.zeros(128)),
    ("model.layers.0.mlp.extra.weight", lambda _: torch.zeros(4)),
    ("model.layers.1.mlp.experts.2.down_proj.weight", lambda tensor: tensor.repeat(1, 2)),
    ("model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor.repeat(2, 1)),
    ("model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor[:32]),
    ("lm_head.weight", lambda tensor: tensor[:-1]),
    ("model.norm.weight", lambda tensor: tensor[:1]),
]


def test_a_tensor_that_the_engine_does_not_have_or_of_another_size_fails_the_refit_by_name(
    engine: EngineProcess, tmp_path: Path
) -> None:
    model = save_family_folder(tmp_path, "qwen3_moe")
    engine.start(engine_settings(tmp_path))
    tensors = checkpoint_tensors(model)
    for name, change in STRANGE:
        with pytest.raises(RefitError, match=name.replace(".", r"\.")) as raised:
            send_weights(engine, tensors | {name: change(tensors.get(name)).contiguous()}, 2**30)
        assert "\n" not in str(raised.value)
        with pytest.raises(RuntimeError, match="before a refit"):
            engine.generate(PROMPTS, GREEDY)
    send_weights(engine, tensors, 2**30)
    assert_answers_like(engine, model)


def test_weights_of_another_type_are_cast(engine: EngineProcess, tmp_path: Path) -> None:
    model = save_family_folder(tmp_path, "qwen3_moe")
    engine.start(engine_settings(tmp_path))
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint_tensors(model).items()}
    send_weights(engine, tensors, 2**30)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert_answers_like(engine, model)


def test_a_quantized_model_takes_no_refit(engine: EngineProcess, tmp_path: Path) -> None:
    tensors = checkpoint_tensors(save_family_folder(tmp_path, "qwen3"))
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine.start(engine_settings(tmp_path, precision="bfloat16"))
    with pytest.raises(RefitError, match="qkv_proj computes what CompressedTensorsLinearMethod needs"):
        send_weights(engine, tensors, 2**20)
