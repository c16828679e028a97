"""Families on the Megatron backend with layers of Transformer Engine, beside Hugging Face's models in float32.

The CPU's matrix (`unit/models/test_matrix.py`) sees megatron-core's local layers: other modules, and other names of
norms in the conversions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_cases import hf_model
from model_families import drawn_model, family_config, trained_by
from policy_cases import hf_logprobs, make_batch, make_settings, worker_of
from tiny_models import make_tokenizer

from nemo_offload_rl.algorithms.supervised_losses import NLLLoss
from nemo_offload_rl.models.families import MEGATRON
from nemo_offload_rl.policy.backends.base import ProcessInfo
from nemo_offload_rl.policy.config import BatchingConfig

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GPU = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
NAMES = ("deepseek_v3-four", "exaone_moe", "gemma-tied", "glm4_moe", "gpt_oss", "hy_v3", "nemotron", "olmoe")
PACKING = BatchingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96, sequence_length_round=1)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_padded_and_packed_are_hugging_faces_up_to_bfloat16_and_exports_load(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip("transformer_engine")
    assert MEGATRON in trained_by(name)
    # Narrower logits than on the CPU: they are rounded to 8 bits.
    model = drawn_model(family_config(name, initializer_range=0.05), seed=0)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    batch = make_batch(num_rows=8, width=24)
    expected = hf_logprobs(model, batch).detach()
    for packing in (None, PACKING):
        changes: dict[str, Any] = {} if packing is None else {"sequence_packing": packing}
        settings = make_settings(
            tmp_path / "model",
            backend=MEGATRON,
            precision="bfloat16",
            bf16=True,
            pipeline_dtype="bfloat16",
            transformer_impl="transformer_engine",
            use_precision_aware_optimizer=True,
            apply_rope_fusion=False,
            **changes,
        )
        with worker_of(settings, GPU) as worker:
            worker.prepare_for_lp_inference()
            difference = (worker.get_logprobs(batch) - expected).abs()
            logger.info("%s, %s: mean %.2e max %.2e", name, packing, difference.mean(), difference.max())
            assert difference.mean() < 0.02
            worker.prepare_for_training()
            worker.train(batch, NLLLoss())
            worker.export_hf(tmp_path / "hf")
        hf_model(tmp_path / "hf")
