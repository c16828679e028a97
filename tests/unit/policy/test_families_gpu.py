"""Every family of models on a GPU in bfloat16, with either backend, beside Hugging Face's models in float32.

The CPU's matrix (`unit/models/test_matrix.py`) sees float32 and megatron-core's local layers. A GPU has other kernels
of attention and of experts, and Transformer Engine's layers, with other names of norms in the conversions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import matrix_results
import pytest
import torch
from engine_process import engine_process, engine_settings
from matrix_cases import (
    BATCHES,
    GREEDY,
    PROMPTS,
    ROWS,
    Row,
    as_batch,
    checkpoint_names,
    hf_model,
    policy_of,
    steps,
    with_tensors,
)
from model_families import drawn_model, family_config, save_as_published, save_family_folder
from models_page import PACKING
from policy_cases import hf_logprobs, make_batch, make_settings, worker_of
from resume_cases import weights_of
from whole_models import WHOLE, save_whole_folder, whole_model

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.models.families import DTENSOR, MEGATRON, state_mixer
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.weight_sync.refit import refit

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GPU = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
PACKED = BatchingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96, sequence_length_round=1)
ON_TRANSFORMER_ENGINE = {
    "bf16": True,
    "pipeline_dtype": "bfloat16",
    "transformer_impl": "transformer_engine",
    "use_precision_aware_optimizer": True,
    "apply_rope_fusion": False,
}


@pytest.mark.parametrize(("name", "backend"), ROWS)
def test_logprobs_padded_and_packed_are_hugging_faces_up_to_bfloat16_and_exports_load(
    tmp_path: Path, name: str, backend: str
) -> None:
    if backend == MEGATRON:
        needs_kernels(state_mixer(family_config(name).to_dict()))
    # Narrower logits than on the CPU: they are rounded to 8 bits.
    model = drawn_model(family_config(name, initializer_range=0.05), seed=0)
    save_as_published(tmp_path / "model", model)
    hf_model(export_of_a_worker_like(tmp_path, name, model, backend))
    matrix_results.write(Row(name, backend, tmp_path), ["import", "logprobs", PACKING, "hf/ folder"], machine="GPU")


def needs_kernels(mixer: str | None) -> None:
    """Skip a test of Megatron without Transformer Engine or, of layers with states, the package of their kernels."""
    pytest.importorskip("transformer_engine")
    if mixer is not None:
        pytest.importorskip("mamba_ssm" if mixer == "Mamba2Mixer" else "fla")


def export_of_a_worker_like(tmp_path: Path, name: str, model: Any, backend: str) -> Path:
    """Compare the worker of the folder `model` with its model, without packing and with it.

    Returns the folder that the one with packing exports after a step.
    """
    batch = make_batch(num_rows=8, width=24)
    expected = hf_logprobs(model, batch).detach()
    for packing in (None, PACKED):
        changes: dict[str, Any] = {} if packing is None else {"sequence_packing": packing}
        if backend == MEGATRON:
            changes |= ON_TRANSFORMER_ENGINE
        settings = make_settings(tmp_path / "model", backend=backend, precision="bfloat16", **changes)
        with worker_of(settings, GPU) as worker:
            worker.prepare_for_lp_inference()
            difference = (worker.get_logprobs(batch) - expected).abs()
            logger.info("%s, %s: mean %.2e max %.2e", name, packing, difference.mean(), difference.max())
            assert difference.mean() < 0.02
            worker.prepare_for_training()
            worker.train(batch, NLLLoss())
            if packing is not None:
                worker.export_hf(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("falcon_h1", DTENSOR),
        ("granitemoehybrid-moe-tied", DTENSOR),
        ("granitemoehybrid-tied", DTENSOR),
        ("lfm2-tied", DTENSOR),
        ("lfm2_moe-tied", DTENSOR),
        ("nemotron_h", DTENSOR),
        ("nemotron_h-moe", DTENSOR),
        ("nemotron_h-moe", MEGATRON),
    ],
)
def test_the_engine_computes_layers_with_states_with_the_weights_of_a_refit(
    tmp_path: Path, name: str, backend: str
) -> None:
    """vLLM computes Mamba-2 on GPUs only; so no row of the CPU's matrix has seen it."""
    the_engine_agrees_after_a_refit(Row(name, backend, tmp_path / "model"), GPU)


def the_engine_agrees_after_a_refit(row: Row, process: ProcessInfo) -> None:
    """Logprobs of sampled tokens are the worker's, and nearly Hugging Face's with the weights after a step."""
    save_family_folder(row.folder, row.name)
    with engine_process() as engine, row.worker(process=process) as worker:
        engine.start(engine_settings(row.folder))
        steps(worker, BATCHES[:1])
        model = with_tensors(hf_model(row.folder), checkpoint_names(row, weights_of(worker)))
        refit(policy_of(worker), engine)
        answers = [samples[0] for samples in engine.generate(PROMPTS, GREEDY)]
        worker.prepare_for_lp_inference()
        batch = as_batch(answers)
        logprobs_BS, expected_BS = worker.get_logprobs(batch), hf_logprobs(model, batch).detach()
        for row_S, expected_S, prompt, answer in zip(logprobs_BS, expected_BS, PROMPTS, answers, strict=True):
            end = len(prompt) + len(answer.token_ids)
            in_engine, here, there = (
                torch.tensor(answer.logprobs),
                row_S[len(prompt) : end],
                expected_S[len(prompt) : end],
            )
            logger.info(
                "%s: engine %.2e, policy %.2e", row.name, (in_engine - there).abs().max(), (here - there).abs().max()
            )
            assert (in_engine - here).abs().mean() < 0.02
            assert (here - there).abs().mean() < 0.02


IN_MEGATRON = ("mistral3", "qwen3_5-tied", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, DTENSOR) for name in WHOLE), *((name, MEGATRON) for name in IN_MEGATRON)]
)
def test_language_models_of_folders_that_read_images_are_hugging_faces_and_exports_load(
    tmp_path: Path, name: str, backend: str
) -> None:
    if backend == MEGATRON:
        needs_kernels(state_mixer(family_config(WHOLE[name][1]).to_dict()))
    model = save_whole_folder(tmp_path / "model", name, initializer_range=0.05)
    whole_model(export_of_a_worker_like(tmp_path, name, model, backend))
