"""Compares logprobs that the worker records with those that vLLM returns, in one run of each engine.

    python recorded_logprobs.py FOLDER VERDICTS

Writes, for each case, what differs and what happened: recomputed requests, samples that vLLM ignored.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from engine_process import engine_here, engine_settings, with_graphs
from model_families import save_family_folder

from nemo_offload_rl.generation.vllm.logprob_recorder import LogprobRecorder
from nemo_offload_rl.generation.vllm.requests import (
    completion_from_output,
    recorded_tokens,
    sampled_tokens,
    sampling_params,
)
from nemo_offload_rl.keys.generation import SamplingSettings

SHARED = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0)).tolist()  # more than two blocks
PROMPTS = [[*SHARED, 5], [*SHARED, 6, 7], [8], [9, 10, 11]]
SAMPLING = SamplingSettings(max_new_tokens=24, temperature=0.9, seed=3)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "seed": None},
    "no seeds": {"seed": None},
    "filters": {"top_k": 20, "top_p": 0.8, "temperature": 1.3},
    "one token": {"max_new_tokens": 1},
    "stop tokens": {"stop_token_ids": tuple(range(0, 256, 8))},
    "stop strings": {"stop_strings": tuple("aeiou")},
}
# 6 blocks of 128 tokens, for 8 responses of up to 330; prompts are read 100 tokens at a time.
CRAMPED = {
    "load_format": "auto",
    "block_size": 128,
    "num_gpu_blocks_override": 7,
    "max_num_batched_tokens": 100,
    "enable_chunked_prefill": True,
}


def compared(engine: Any, **changes: Any) -> dict[str, Any]:
    """Count tokens, and those whose recorded logprob is another one than vLLM's."""
    sampling = SamplingSettings(**{**SAMPLING.__dict__, **changes})
    num_samples = 2 if sampling.temperature else 1
    happened.clear()
    requests = []
    for position, prompt in enumerate(PROMPTS):
        params = sampling_params(sampling, num_samples, position, records_logprobs=False)
        requests.append(engine._add(prompt, params))
    outputs: dict[str, Any] = {}
    while len(outputs) < len(requests):
        outputs.update((output.request_id, output) for output in engine._step())
    wanted = [list(astuple(tokens)) for output in outputs.values() for tokens in sampled_tokens(output)]
    recorded = [logprobs for logprobs, _ in recorded_tokens(engine._rpc("take_logprobs", (wanted, [])))]
    returned = [completion_from_output(sample).logprobs for output in outputs.values() for sample in output.outputs]
    different = sum(
        a != b for one, other in zip(recorded, returned, strict=True) for a, b in zip(one, other, strict=True)
    )
    reasons = {sample.finish_reason for output in outputs.values() for sample in output.outputs}
    return {
        "tokens": sum(map(len, returned)),
        "different": different,
        "distinct": len({value for values in returned for value in values}),
        "stopped": "stop" in reasons,
        **happened,
    }


happened: Counter[str] = Counter()
add = LogprobRecorder.add


def counted(self: LogprobRecorder, logprobs: Any, requests: Any, positions: Any, is_sampled: Any) -> None:
    happened["ignored"] += int((~is_sampled).sum())
    add(self, logprobs, requests, positions, is_sampled)


def main(folder: Path, verdicts: Path) -> None:
    save_family_folder(folder, "qwen3")
    LogprobRecorder.add = counted
    results: dict[str, Any] = {}
    precision = "bfloat16" if torch.cuda.is_available() else "float32"
    same: dict[str, Any] = {"precision": precision, "enable_sleep_mode": False}  # one engine of a process may sleep
    engine = engine_here(engine_settings(folder, **same, **with_graphs(load_format="auto")))
    for name, changes in CASES.items():
        results[name] = compared(engine, **changes)
    engine.shutdown()
    engine = engine_here(engine_settings(folder, **same, vllm_kwargs=CRAMPED, per_request_seeds=False))
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counted_preemption(*args: Any, **kwargs: Any) -> Any:
        happened["recomputed"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted_preemption
    results["cramped"] = compared(engine, seed=None, max_new_tokens=90)
    engine.shutdown()
    verdicts.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
