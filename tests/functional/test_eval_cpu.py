"""An evaluation on a CPU, killed once: a checkpoint's model, two data sets, greedy and sampled responses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Finished
from tiny_models import make_tokenizer, save_model_folder

EVAL = Path(__file__).parents[2] / "examples/configs/eval.yaml"
SUMS = "{dataset_name: arithmetic, num_digits: 1, operators: ['+'], size: 4, holdout: 4, seed: 0}"


def _votes(records: list[dict[str, Any]], k: int) -> float:
    """NeMo-RL's eval_cons_k of one prompt: every subset votes, and the reward of the winner's first response counts."""
    answers = [record["answer"] for record in records]
    won = []
    for subset in combinations(answers, k):
        majority = max(subset, key=subset.count)  # the first of the most frequent
        won.append(records[answers.index(majority)]["correct"])
    return sum(won) / len(won)


@pytest.mark.processes
def test_an_evaluation_samples_scores_and_writes_what_its_responses_say(
    run_script: Callable[..., Finished], tmp_path: Path
) -> None:
    """Greedy responses are Hugging Face's, and each metric is that of the responses on disk.

    The engine generates ten responses at a time. All are one batch, in which the evaluation is killed.
    """
    model: Any = save_model_folder(tmp_path / "run/step_2/hf", seed=0)
    rows = [{"q": f"what is {i}+1?", "a": str(i + 1)} for i in range(3)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = f"{{dataset_name: ResponseDataset, path: {tmp_path}/d.jsonl, input_key: q, output_key: a, env_name: math}}"
    command = (
        "tests/support/one_process_eval.py",
        "--config", str(EVAL),
        f"generation.model_name={tmp_path}/run",
        "generation.temperature=1.0",
        "generation.max_new_tokens=8",
        "+generation.vllm_kwargs.max_num_seqs=10",
        "generation.vllm_cfg.precision=float32",
        "generation.vllm_cfg.kv_cache_memory_gib=0.0625",
        "generation.vllm_cfg.max_model_len=64",
        "data.max_input_seq_length=32",
        "data.default.env_name=arithmetic",
        "~data.validation",
        f"+data.validation={{dataset_name: mixture, weights: null, datasets: [{SUMS}, {own}]}}",
        "+env.arithmetic={num_workers: 0}",
        "env.math.num_workers=0",
        "cluster.gpus_per_node=0",
        "eval.num_tests_per_prompt=4",
        "eval.k_value=3",
        "eval.metric=cons@k",
        "eval.greedy=true",
        f"eval.save_path={tmp_path}/out",
    )  # fmt: skip
    killed = run_script(*command, env={"IS_KILLED": "1"})
    assert killed.status == -signal.SIGKILL, killed.stderr
    kept = (tmp_path / "out/responses.jsonl").read_text().splitlines()
    assert 1 <= len(kept) <= 10
    done = run_script(*command)
    assert done.status == 0, done.stderr
    assert f"goes on  {len(kept)} of 35 answers are in this folder" in done.stdout
    assert done.stdout.endswith(
        f"  results    {tmp_path}/out/results.json\n"
        f"  responses  {tmp_path}/out/responses.jsonl\n"
        f"  page       {tmp_path}/out/index.html\n"
    )
    written = json.loads((tmp_path / "out/results.json").read_text())
    lines = (tmp_path / "out/responses.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["sample"] for record in records} == {0, 1, 2, 3} and set(kept) <= set(lines)
    order = {"sampled": 0, "greedy": 1}
    assert records == sorted(records, key=lambda one: (one["prompt_index"], order[one["kind"]], one["sample"]))
    assert written["model"] == f"{tmp_path}/run/step_2/hf"
    assert list(written["results"]) == ["all", "arithmetic", "d"]
    assert (tmp_path / "out/index.html").read_text().count("<details>") == 7 + 1

    tokenizer = make_tokenizer()
    for record in records:
        if record["kind"] == "greedy":
            ids = tokenizer(record["prompt"], return_tensors="pt").input_ids
            said = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=256)[0, ids.shape[1] :]
            assert record["token_ids"] == said.tolist()

    for name, metrics in written["results"].items():
        mine = [record for record in records if name in ("all", record["data_set"])]
        sampled = [record for record in mine if record["kind"] == "sampled"]
        greedy = [record for record in mine if record["kind"] == "greedy"]
        places = sorted({record["prompt_index"] for record in mine})
        assert metrics["num_prompts"] == len(places) == len(greedy) == {"all": 7, "arithmetic": 4, "d": 3}[name]
        right = [sum(r["correct"] for r in sampled if r["prompt_index"] == place) for place in places]
        for k in (1, 2, 3, 4):
            expected = sum(1 - comb(4 - count, k) / comb(4, k) for count in right) / len(places)
            assert metrics[f"pass_at_{k}"] == pytest.approx(expected)
            votes = [_votes([r for r in sampled if r["prompt_index"] == place], k) for place in places]
            assert metrics[f"cons_at_{k}"] == pytest.approx(sum(votes) / len(votes))
        assert metrics["accuracy_greedy"] == pytest.approx(sum(r["correct"] for r in greedy) / len(places))
        assert metrics["mean_response_tokens"] == pytest.approx(
            torch.tensor([len(r["token_ids"]) for r in sampled]).double().mean().item()
        )
    assert len({tuple(r["token_ids"]) for r in records if r["kind"] == "sampled"}) > 7, "samples of a prompt differ"
