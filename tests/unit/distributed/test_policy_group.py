from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from closeness import assert_close
from policy_cases import NLL, RaisesAt, make_batch, make_settings, torch_optimizer
from tiny_models import qwen3_config, save_model_folder
from transformers import AutoModelForCausalLM

from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.distributed.policy_group import EngineStart, start_policy
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.weight_sync.refit import refit


@torch.no_grad()
def test_two_policy_workers_refit_two_engines_with_what_they_have_learnt(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    save_model_folder(tmp_path / "model", 0, qwen3_config(tied=True))
    settings = VllmSettings(
        model_name=str(tmp_path / "model"),
        hf_config_overrides={},
        seed=0,
        async_engine=False,
        precision="float32",
        kv_cache_dtype="auto",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        kv_cache_memory_gib=0.0625,
        max_model_len=256,
        enforce_eager=True,
        enable_sleep_mode=True,
        per_request_seeds=True,
        max_restarts=0,
        vllm_kwargs={},
    )
    engine = RayGenerationEngine(cluster, settings, begins=False)
    start = EngineStart(engine.begin, engine.wait_until_ready)  # as on a GPU that both share
    # A learning rate at which one step changes what is said.
    optimizer = torch_optimizer("AdamW", lr=0.1)
    worker = make_settings(tmp_path / "model", optimizer=optimizer)
    policy = start_policy(cluster, worker, keep_reference=False, engine=start)
    greedy = SamplingSettings(max_new_tokens=10, temperature=0.0)
    sampled = SamplingSettings(max_new_tokens=6, temperature=1.0, seed=1)
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 150)]
    answers: list[list[list[int]]] = []
    for step in range(2):
        policy.prepare_for_training()
        policy.train(make_batch(seed=step), NLL())
        refit(policy, engine)
        checksums = policy.export_hf(tmp_path / f"step{step}")
        assert "model.safetensors" in checksums
        assert policy.damaged_files(tmp_path / f"step{step}", checksums) == {}
        assert policy.damaged_files(tmp_path, checksums).keys() == checksums.keys()  # as if all were lost
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"step{step}").float().eval()
        completions = [completion for (completion,) in engine.generate(prompts, greedy)]
        for prompt, completion in zip(prompts, completions, strict=True):
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
            assert completion.token_ids == logits.argmax(-1).tolist()
            expected = logits.log_softmax(-1).max(-1).values
            assert_close(torch.tensor(completion.logprobs), expected)
        answers.append([completion.token_ids for completion in completions])
        together = engine.generate(prompts * 2, sampled, num_samples=2)
        assert [len(samples) for samples in together] == [2] * 6
        assert together == engine.generate(prompts * 2, sampled, num_samples=2)
        one_by_one = [[replace(sampled, seed=1 + 2 * place + number) for number in range(2)] for place in range(6)]
        found = [finished for chunk in engine.generate_as_finished(prompts * 2, one_by_one) for finished in chunk]
        assert len(found) == 12
        assert all(together[place][number] == completion for place, number, completion in found)
        engine.finish_generation(discard_weights=True)
    assert answers[0] != answers[1]
    engine.shutdown()
    policy.shutdown()


@pytest.mark.timeout(1500)  # gloo would wait for half an hour
def test_a_loss_that_raises_on_the_last_pipeline_stage_ends_the_stages_that_wait_for_it(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    save_model_folder(tmp_path, 0, qwen3_config(tied=False))
    sizes = {"pipeline_model_parallel_size": 2, "train_global_batch_size": 8, "train_micro_batch_size": 2}
    settings = make_settings(tmp_path, backend="megatron", **sizes)
    processes = [ProcessInfo(rank=rank, world_size=2, init_method="env://", device="cpu") for rank in range(2)]
    spec = WorkerSpec(
        name="policy",
        factory="ray_workers:megatron_policy_worker",
        kwargs={"settings": settings, "keep_reference": False},
        per_rank_kwargs=[{"process": process} for process in processes],
    )
    group = RayWorkerGroup(cluster, spec)
    policy = Policy(group, settings)
    policy.prepare_for_training()
    assert policy.train(make_batch(), NLL()).grad_norm[0] > 0
    with pytest.raises(ArithmeticError, match="a bad loss") as raised:
        policy.train(make_batch(), RaisesAt(2))
    assert any("policy worker 1, train" in note for note in raised.value.__notes__)
    stages = [psutil.Process(pid) for pid in policy.pids()]
    policy.shutdown()
    assert not any(stage.is_running() for stage in stages)
