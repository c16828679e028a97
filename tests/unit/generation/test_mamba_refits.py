"""Refits of families with Mamba-2 layers into vLLM's models, which a CPU can build and load, but not run."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family_folder

from nemo_offload_rl.backends.hf.weight_files import HubNames
from nemo_offload_rl.generation.vllm.weight_loading import BucketReader, RefitSession, SeenLoads
from nemo_offload_rl.generation.vllm.write_recorder import WriteRecorder

pytestmark = [pytest.mark.processes, pytest.mark.models]


def built_by_vllm(folder: Path) -> Any:
    """Return vLLM's model of a folder, without weights; makes this process a rank of its own."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    config = EngineArgs(str(folder), dtype="float32", max_model_len=256, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, backend="gloo")
        initialize_model_parallel(1)
        # vLLM builds experts without a gate for GPUs only.
        type(current_platform).is_cuda_alike = lambda _self: True
        try:
            return initialize_model(config)
        finally:
            del type(current_platform).is_cuda_alike


def refits_all_states(folder: Path, name: str) -> None:
    """Load a model twice, each time counted element by element, and compare what vLLM derives."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    own = save_family_folder(folder, name)
    model, hub = built_by_vllm(folder), HubNames(own.config.model_type)
    biases = [it for it in own.named_buffers() if it[0].endswith("correction_bias")]
    tensors = [(hub.of(name), tensor.detach()) for name, tensor in (*own.named_parameters(), *biases)]
    session, recorder = RefitSession(model, SeenLoads(), BucketReader()), WriteRecorder()
    session._received = {name: (name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}
    for _ in range(2):
        with recorder:
            model.load_weights(session._observed(tensors, [], recorder))
    assert session.finish() == {}
    expected = dict(own.named_parameters())
    found = dict(model.named_parameters())
    rates = [name for name in found if name.endswith(".A")]
    assert rates
    for name in rates:
        own_name = name.replace("mamba.mamba.", "mamba.")  # of Falcon-H1
        assert torch.equal(found[name], -expected[f"{own_name}_log"].exp())
    for name, tensor in found.items():
        place, end, kind = name.partition(".experts.routed_experts.")
        if end and f"{place}.experts.up_proj" in expected:
            assert torch.equal(tensor, expected[f"{place}.experts.{'up' if kind.startswith('w13') else 'down'}_proj"])


@pytest.mark.parametrize(
    "name",
    [
        "falcon_h1",
        "falcon_h1-norm-tied",
        "granitemoehybrid-moe-tied",
        "nemotron_h",
        "nemotron_h-latent",
        "nemotron_h-moe",
    ],
)
def test_a_refit_writes_every_state_of_the_engine_and_the_rates_that_it_derives(tmp_path: Path, name: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=refits_all_states, args=(tmp_path, name))
    process.start()
    process.join()
    assert process.exitcode == 0
