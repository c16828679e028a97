"""One engine over two devices: each of vLLM's own worker processes holds half of every layer and of every expert."""

from __future__ import annotations

import psutil
import pytest
import torch
from model_families import make_family

from nemo_offload_rl.errors import WorkerDiedError
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.refit import refit

NUM_SLOTS = 2


@torch.no_grad()
def test_refitted_halves_answer_like_the_whole_and_a_killed_worker_is_a_dead_engine(start_engine, start_policy) -> None:
    engine, policy = start_engine("qwen3_moe", tensor_parallel_size=2), start_policy("qwen3_moe")
    sampling = SamplingSettings(max_new_tokens=8, temperature=0.0)
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (4, 9, 150)]
    for name in ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        policy.set_weights(2, drop=name)
        with pytest.raises(RefitError, match=rf"as they were: {name}\. The policy"):
            refit(policy, engine)
    policy.set_weights(1)
    refit(policy, engine)
    answers = [samples[0].token_ids for samples in engine.generate(prompts, sampling)]
    model = make_family("qwen3_moe", 1)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist()

    (pid,) = engine.group.pids()
    workers = [child for child in psutil.Process(pid).children(recursive=True) if "Worker_TP" in child.name()]
    assert len(workers) == 2
    workers[-1].kill()
    with pytest.raises(WorkerDiedError, match="a worker process of vLLM has ended") as died:
        engine.generate(prompts, sampling)
    assert died.value is engine.group.failure  # what a restart of the engine asks for
    engine.restart()
    refit(policy, engine)
    assert [samples[0].token_ids for samples in engine.generate(prompts, sampling)] == answers
