"""Engines with 8-bit weights: what a refit quantizes, and that the engine is one loaded from a quantized checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess, engine_process, engine_settings, send_weights
from forked import Script
from fp8_engines import answers, save_model, save_quantized, sent, stacked

from nemo_offload_rl.generation.vllm import fp8_loading
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.generation.vllm.fp8_loading import quantize_blocks
from nemo_offload_rl.protocols.refit import RefitError

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process() as process:
        yield process


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (3, 128, 256), (2, 100, 64), (1, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_quantized_as_vllm_does(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[..., :5, :7] *= 30
    weight[..., -1, :] = 0
    data, scales = quantize_blocks(weight)
    for matrix, its_data, its_scales in zip(
        weight.view(-1, *shape[-2:]), data.view(-1, *shape[-2:]), scales.reshape(-1, *scales.shape[-2:]), strict=True
    ):
        for row, column in itertools.product(range(its_scales.shape[0]), range(its_scales.shape[1])):
            block = (..., slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scale = matrix[block].abs().max().float().clamp(1e-4) / 448
            assert its_scales[row, column] == scale
            assert torch.equal(
                its_data[block].float(), (matrix[block].float() * (1 / scale)).to(torch.float8_e4m3fn).float()
            )
    # In pieces, of rows and of matrices, with the same result.
    monkeypatch.setattr(fp8_loading, "_CHUNK_ELEMENTS", 128 * 64)
    again = quantize_blocks(weight)
    assert torch.equal(again[0].float(), data.float()) and torch.equal(again[1], scales)


def test_what_vllm_s_own_function_gives_is_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import torch
from vllm.utils.deep_gemm import per_block_cast_to_fp8
from nemo_offload_rl.generation.vllm import fp8_loading
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.generation.vllm.fp8_loading import quantize_blocks
for shape in ((256, 384), (200, 130), (1, 20)):
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        theirs = per_block_cast_to_fp8(weight)
        for one, other in zip(theirs, quantize_blocks(weight), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.float(), other.float())
print("equal")
""")
    env = {**os.environ, **vllm_env("cpu")}
    done = Script([tmp_path / "script.py"], tmp_path, cwd=tmp_path, env=env).wait(1500)
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


@pytest.mark.parametrize(
    ("family", "tensor_parallel_size", "keys", "kept"),
    [
        # Queries, keys and values are one tensor on disk.
        ("phi3", 1, {"num_last_layers_in_bf16": 1}, "layers.1."),
        ("llama", 2, {"quantization_ignored_layer_kws": ("o_proj",)}, "o_proj"),
        ("qwen3_moe", 2, {}, ".mlp.gate."),
    ],
)
def test_a_refit_brings_what_a_checkpoint_in_8_bits_holds(
    engine: EngineProcess, tmp_path: Path, family: str, tensor_parallel_size: int, keys: dict[str, Any], kept: str
) -> None:
    first, second = (save_model(tmp_path, family, seed) for seed in range(2))
    size = {"tensor_parallel_size": tensor_parallel_size}
    engine.start(engine_settings(tmp_path, precision="fp8", **size, **keys))
    found = []
    for model in (first, second):
        send_weights(engine, sent(model), 70_000)  # each bucket overwrites one before
        found.append(answers(engine))
    if "moe" in family:
        send_weights(engine, stacked(second), 70_000)
        assert answers(engine) == found[1]
        # An evaluation: vLLM quantizes what it loads.
        engine.start(engine_settings(tmp_path, precision="fp8", vllm_kwargs={"load_format": "auto"}, **size))
        assert answers(engine) == found[1]
    tensors = sent(second)
    if family == "llama":
        name = "model.layers.1.self_attn.k_proj.weight"
        with pytest.raises(RefitError, match=f"of the engine: {name}. The policy"):
            send_weights(engine, {key: tensor for key, tensor in tensors.items() if key != name}, 2**30)
        with pytest.raises(RefitError, match=f"cannot load {name}"):
            send_weights(engine, tensors | {name: tensors[name][:128].contiguous()}, 2**30)
    save_quantized(tmp_path, tensors, kept.split())
    engine.start(engine_settings(tmp_path, precision="bfloat16", vllm_kwargs={"load_format": "auto"}, **size))
    assert answers(engine) == found[1] != found[0]


@pytest.mark.parametrize("family", [pytest.param(name, marks=GPU) for name in ("qwen3", "qwen3_moe")])
def test_on_a_gpu_a_refit_brings_what_a_checkpoint_in_8_bits_holds(tmp_path: Path, family: str) -> None:
    script = Path(__file__).parents[2] / "support" / "fp8_engines.py"
    env = {**os.environ, **vllm_env("cuda", use_deep_gemm=False)}
    command = [sys.executable, str(script), str(tmp_path), family, str(tmp_path / "answers.json")]
    subprocess.run(command, env=env, check=True)
    found = json.loads((tmp_path / "answers.json").read_text())
    assert found["same_as_on_a_cpu"] == [True, True]
    before, loaded, refitted = ([tokens for tokens, _ in found[way]] for way in ("before", "loaded", "refitted"))
    assert refitted == loaded != before
