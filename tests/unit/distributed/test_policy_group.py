from __future__ import annotations

from pathlib import Path

import torch
from policy_cases import NLL, make_batch, make_settings
from tiny_models import qwen3_config, save_model_folder
from transformers import AutoModelForCausalLM

from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.distributed.policy_group import start_policy
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.generation.settings import VllmSettings
from nemo_offload_rl.policy.settings import OptimizerSettings
from nemo_offload_rl.weight_sync.refit import refit


@torch.no_grad()
def test_two_policy_workers_refit_two_engines_with_what_they_have_learnt(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    save_model_folder(tmp_path / "model", 0, qwen3_config(tied=True))
    settings = VllmSettings(
        model_name=str(tmp_path / "model"),
        seed=0,
        async_engine=False,
        precision="float32",
        kv_cache_dtype="auto",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        kv_cache_memory_gib=0.0625,
        max_model_len=256,
        enforce_eager=True,
        per_request_seeds=True,
        max_restarts=0,
        vllm_kwargs={},
    )
    engine = RayGenerationEngine(cluster, settings)
    # A learning rate at which one step changes what is said.
    optimizer = OptimizerSettings(name="torch.optim.AdamW", kwargs={"lr": 0.1})
    policy = start_policy(cluster, make_settings(tmp_path / "model", optimizer=optimizer), keep_reference=False)
    greedy = SamplingSettings(max_new_tokens=10, temperature=0.0)
    sampled = SamplingSettings(max_new_tokens=6, temperature=1.0, seed=1)
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 150)]
    answers: list[list[list[int]]] = []
    for step in range(2):
        policy.prepare_for_training()
        policy.train(make_batch(seed=step), NLL())
        refit(policy, engine)
        policy.export_hf(tmp_path / f"step{step}")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"step{step}").float().eval()
        completions = [completion for (completion,) in engine.generate(prompts, greedy)]
        for prompt, completion in zip(prompts, completions, strict=True):
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
            assert completion.token_ids == logits.argmax(-1).tolist()
            expected = logits.log_softmax(-1).max(-1).values
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        answers.append([completion.token_ids for completion in completions])
        together = engine.generate(prompts * 2, sampled, num_samples=2)
        assert [len(samples) for samples in together] == [2] * 6
        assert together == engine.generate(prompts * 2, sampled, num_samples=2)
        engine.finish_generation(discard_weights=True)
    assert answers[0] != answers[1]
    engine.shutdown()
    policy.shutdown()
