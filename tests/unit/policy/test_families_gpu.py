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
from matrix_cases import ROWS, Row, hf_model
from model_families import drawn_model, family_config
from policy_cases import hf_logprobs, make_batch, make_settings, worker_of
from tiny_models import make_tokenizer

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.models.families import MEGATRON
from nemo_offload_rl.models.page import PACKING
from nemo_offload_rl.protocols.backend import ProcessInfo

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
        pytest.importorskip("transformer_engine")
    # Narrower logits than on the CPU: they are rounded to 8 bits.
    model = drawn_model(family_config(name, initializer_range=0.05), seed=0)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
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
            worker.export_hf(tmp_path / "hf")
        hf_model(tmp_path / "hf")
    matrix_results.write(Row(name, backend, tmp_path), ["import", "logprobs", PACKING, "hf/ folder"], machine="GPU")
