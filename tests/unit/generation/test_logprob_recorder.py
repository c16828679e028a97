"""What is recorded of sampled tokens, step by step; the last test compares with what vLLM returns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Script

from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.generation.vllm.logprob_recorder import LogprobRecorder, SampledTokens


def step(recorder: LogprobRecorder, sampled: dict[str, tuple[int, float]], ignored: str = "") -> None:
    """One step: each request's position and logprob; requests have random characters of vLLM's."""
    recorder.add(
        torch.tensor([logprob for _, logprob in sampled.values()]),
        [f"{name}-0a1b2c3d" for name in sampled],
        np.array([position for position, _ in sampled.values()]),
        np.array([name != ignored for name in sampled]),
    )


def test_a_response_has_the_last_logprob_of_each_of_its_positions() -> None:
    recorder = LogprobRecorder(torch.device("cpu"), chunk_tokens=3)
    step(recorder, {"request-1": (4, -1.0), "0_request-2": (2, -2.0)})
    step(recorder, {"request-1": (5, -1.5), "0_request-2": (3, -2.5), "1_request-2": (2, -3.0)})
    # The first request lost its last token, and is computed again in two pieces by other weights.
    recorder.version = 7
    step(recorder, {"0_request-2": (4, -2.75), "request-1": (4, -9.0)}, ignored="request-1")
    step(recorder, {"request-1": (5, -1.25), "0_request-2": (5, -9.0)})  # the second ended a token before
    taken = recorder.take([SampledTokens("0_request-2", 2, 3), SampledTokens("request-1", 4, 2)])
    assert [list(logprobs) for logprobs, _ in taken] == [[-2.0, -2.5, -2.75], [-1.0, -1.25]]
    assert [versions for _, versions in taken] == [[0, 2, 7, 1], [0, 1, 7, 1]]
    # What a request without tokens, and one that goes on, have.
    step(recorder, {"1_request-2": (3, -3.5)})
    taken = recorder.take([SampledTokens("request-3", 7, 0), SampledTokens("1_request-2", 2, 2)])
    assert [list(logprobs) for logprobs, _ in taken] == [[], [-3.0, -3.5]]
    assert [versions for _, versions in taken] == [[], [0, 1, 7, 1]]


def test_nothing_is_kept_of_requests_that_were_taken_or_dropped() -> None:
    recorder = LogprobRecorder(torch.device("cpu"))
    for position in range(3):
        step(recorder, {"a": (position, -1.0), "b": (position, -2.0), "c": (position, -3.0)})
    recorder.take([SampledTokens("a", 0, 2)], dropped=["b", "unheard-of"])
    step(recorder, {"c": (3, -3.0), "a": (3, -1.0)})  # vLLM hears later that a string has ended it
    assert recorder.take([]) == [] and len(recorder._logprobs) == 4
    step(recorder, {"c": (4, -3.0)})
    recorder.take([SampledTokens("c", 0, 5)])
    step(recorder, {})
    assert (len(recorder._logprobs), len(recorder._numbers), len(recorder._ids), recorder._gone) == (0, 0, 0, [])
    recorder.take([])
    assert len(recorder._room) == 0


def test_a_token_that_was_not_recorded_is_named() -> None:
    recorder = LogprobRecorder(torch.device("cpu"))
    step(recorder, {"a": (1, -1.0), "b": (1, -2.0)})
    step(recorder, {"a": (2, -1.0), "b": (2, -2.0)}, ignored="b")
    with pytest.raises(LookupError, match="token 1 of 2 of request b was not recorded"):
        recorder.take([SampledTokens("a", 1, 2), SampledTokens("b", 1, 2)])


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_recorded_logprobs_are_bit_by_bit_those_that_vllm_returns(device: str, tmp_path: Path) -> None:
    verdicts, output = tmp_path / "verdicts.json", tmp_path / "output"
    output.mkdir()
    script = Script(
        [Path(__file__).parents[2] / "support/recorded_logprobs.py", tmp_path / "model", verdicts],
        output,
        cwd=tmp_path,
        env={**os.environ, **vllm_env(device)},
    )
    ended = script.wait(1500)
    assert ended.status == 0, ended.stderr
    found = json.loads(verdicts.read_text())
    assert all(case["different"] == 0 and case["distinct"] > 4 for case in found.values()), found
    assert found["stop tokens"]["stopped"] and found["stop strings"]["stopped"]
    assert found["one token"]["tokens"] == 8
    assert found["cramped"]["recomputed"] > 0 and found["cramped"]["ignored"] > 0
