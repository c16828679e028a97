"""One engine over two devices: each of vLLM's own worker processes holds half of every layer and of every expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from engine_process import engine_process, engine_settings, send_weights
from matrix_cases import GREEDY, PROMPTS, answers_like
from model_families import checkpoint_tensors, make_family, save_family_folder

from nemo_offload_rl.errors import WorkerDiedError
from nemo_offload_rl.protocols.refit import RefitError


@torch.no_grad()
def test_refitted_halves_answer_like_the_whole_and_a_killed_worker_is_a_dead_engine(tmp_path: Path) -> None:
    save_family_folder(tmp_path, "qwen3_moe")
    settings = engine_settings(tmp_path, tensor_parallel_size=2)
    whole_experts = replace(settings, expert_parallel_size=2)
    model = make_family("qwen3_moe", 1)
    weights = checkpoint_tensors(model)
    with engine_process() as engine:
        engine.start(settings)
        for name in ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            with pytest.raises(RefitError, match=rf"of the engine: {name}\. The policy"):
                send_weights(engine, {key: tensor for key, tensor in weights.items() if key != name}, 2**20)
        send_weights(engine, weights, 2**20)
        answers = answers_like(engine, model)
        children = psutil.Process(engine.pid).children(recursive=True)
        workers = [child for child in children if "Worker_TP" in child.name()]
        assert len(workers) == 2
        shared = [region.path for worker in workers for region in worker.memory_maps() if "-cpushm_" in region.path]
        assert shared or not torch.cpu._is_avx512_supported()  # without it, vLLM's build for the CPU shares none
        assert not any(Path(path).exists() for path in shared)  # nothing to leave behind when they are killed
        workers[-1].kill()
        with pytest.raises(WorkerDiedError, match="a worker process of vLLM has ended"):
            engine.generate(PROMPTS, GREEDY)
        # Whole experts on each worker: the policy sends them as before, and a worker takes its own.
        engine.start(whole_experts)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        with pytest.raises(RefitError, match=rf"of the engine: {name}\. The policy"):
            send_weights(engine, {key: tensor for key, tensor in weights.items() if key != name}, 2**20)
        for sent in (weights, {name: parameter.detach() for name, parameter in model.named_parameters()}):  # stacked
            send_weights(engine, sent, 2**20)
            found = answers_like(engine, model)
            assert [answer.token_ids for answer in found] == [answer.token_ids for answer in answers]

        # Biases of experts: of split ones one bias is added on one of the workers only, of whole ones all are.
        save_family_folder(tmp_path, "gpt_oss")
        model = make_family("gpt_oss", 1)
        for one in (settings, whole_experts):
            engine.start(one)
            for _ in range(2):
                send_weights(engine, checkpoint_tensors(model), 2**20)
                answers_like(engine, model)
