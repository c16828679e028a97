"""The policy worker on a real GPU."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from policy_cases import make_batch, make_settings, save_family, worker_of
from tiny_models import make_qwen3, make_tokenizer, qwen3_config, save_model_folder
from torch._dynamo.utils import counters

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.early_start import compile_early, hold_memory
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.residency.device.cuda import CudaDevice
from nemo_offload_rl.residency.device.cuda_copies import STAGING_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

VARIANTS = {
    "away": {},
    "waited for": {"residency_overlap": False},
    "pageable": {"use_pinned_optimizer_offload": False},
    "streamed": {"offload_optimizer_states": True},
    "streamed in parts": {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.2},
    "away for logprobs": {"offload_optimizer_states_for_logprob": True},
    "auto": {"residency": "auto", "engine_memory_share": 0.5},
    "inputs of layers away": {"activation_offload": True, "activation_checkpointing": True},
    "everything away": {"cpu_offload": True, "activation_checkpointing": True},
    "everything away, activations too": {
        "cpu_offload": True,
        "activation_offload": True,
        "activation_checkpointing": True,
    },
}


def losses(folder, width=14, **changes) -> tuple[list[float], torch.Tensor]:
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    settings = make_settings(folder, precision="bfloat16", deterministic=True, **changes)
    worker = PolicyWorker(settings, process, keep_reference=True)
    values = []
    try:
        for seed in range(4):
            batch = make_batch(seed=seed, width=width)
            worker.prepare_for_lp_inference()
            values.append(float(worker.get_logprobs(batch).double().sum()))
            values.append(float(worker.get_reference_logprobs(batch).double().sum()))
            worker.prepare_for_training()
            values += worker.train(batch, NLLLoss()).loss
            worker.offload_before_refit()
            # As they are sent: parameters that pass through the GPU are cast on the way.
            weights = {name: tensor.bfloat16().cpu().clone() for name, tensor in worker.named_weights()}
            worker.offload_after_refit()
        return values, torch.cat([tensor.flatten() for tensor in weights.values()])
    finally:
        torch.use_deterministic_algorithms(False)
        worker.shutdown()


@pytest.fixture(scope="module")
def resident(tmp_path_factory) -> tuple[Path, list[float], torch.Tensor]:
    """A model's folder, and the losses and weights of a run that moves nothing."""
    folder = tmp_path_factory.mktemp("model")
    save_family(folder, "qwen3")
    return folder, *losses(folder, colocated=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_logprobs_and_weights_are_bitwise_those_without_any_residency(variant, resident):
    folder, expected, expected_weights = resident
    values, weights = losses(folder, **VARIANTS[variant])
    assert values == expected
    assert torch.equal(weights, expected_weights)


def test_compiled_layers_are_recomputed_for_any_number_of_rows(tmp_path):
    save_family(tmp_path, "qwen3")
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    changes = {"torch_compile": True, "activation_checkpointing": True, "train_micro_batch_size": 32}
    settings = make_settings(tmp_path, precision="bfloat16", logprob_batch_size=32, **changes)
    worker = PolicyWorker(settings, process, keep_reference=False)
    try:
        for rows in (1, 4, 16, 32, 1, 5):
            batch = make_batch(num_rows=32, seed=rows).select(range(rows))
            worker.prepare_for_training()
            loss, _ = worker.forward_backward(batch, NLLLoss())
            assert loss > 0
            worker.optim_step()
            worker.prepare_for_lp_inference()
            worker.get_logprobs(batch)
    finally:
        worker.shutdown()


def test_layers_compile_in_held_memory_before_the_worker_is_made_and_passes_compile_nothing_more(tmp_path):
    save_family(tmp_path, "qwen3")
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    changes = {"torch_compile": True, "activation_checkpointing": True, "engine_memory_share": 0.5}
    settings = make_settings(tmp_path, precision="bfloat16", **changes)
    torch._dynamo.reset()
    counters.clear()
    held_bytes = hold_memory(settings, process)
    assert held_bytes > 1 << 30
    reserved_bytes, (free_bytes, _) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    compile_early(settings, process, most_bytes=held_bytes)
    assert torch.cuda.memory_reserved() >= reserved_bytes  # an engine may be measuring
    assert free_bytes - torch.cuda.mem_get_info()[0] < 512 << 20
    assert counters["stats"]["unique_graphs"] == 2
    worker = PolicyWorker(settings, process, keep_reference=True)
    try:
        assert torch.cuda.memory_reserved() < reserved_bytes
        for width in (14, 10):
            worker.prepare_for_lp_inference()
            worker.get_logprobs(make_batch(width=width))
            worker.get_reference_logprobs(make_batch(width=width))
            worker.prepare_for_training()
            worker.train(make_batch(width=width), NLLLoss())
        assert counters["stats"]["unique_graphs"] == 2
    finally:
        worker.shutdown()


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "mistral-window"])
def test_a_deterministic_run_repeats_also_where_rows_are_longer_than_a_block_of_attention(family, tmp_path):
    save_family(tmp_path, family)
    changes = {"width": 500, "max_total_sequence_length": 512}
    expected, expected_weights = losses(tmp_path, **changes, colocated=False)
    for _ in range(2):
        values, weights = losses(tmp_path, **changes)
        assert values == expected
        assert torch.equal(weights, expected_weights)


@pytest.mark.parametrize("variant", ["away", "streamed", "streamed in parts"])
def test_saving_loading_and_exporting_take_no_more_gpu_memory_than_training(variant, tmp_path, monkeypatch):
    config = qwen3_config(num_layers=8, hidden_size=1024)
    config.initializer_range = 0.02
    save_model_folder(tmp_path / "model", 0, config)
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    changes = {**VARIANTS[variant], **({"offload_optimizer_states_chunk_mib": 64} if "parts" in variant else {})}
    settings = make_settings(tmp_path / "model", precision="bfloat16", **changes)
    peaks: dict[str, int] = {}

    @contextmanager
    def peak_of(name):
        gc.collect()  # of a worker that has ended
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seen = [0]
        with monkeypatch.context() as patch:
            # The worker resets torch's counter as it enters a phase.
            drain = CudaDevice.drain_peak_bytes
            patch.setattr(CudaDevice, "drain_peak_bytes", lambda device: seen.append(drain(device)) or seen[-1])
            yield
        torch.cuda.synchronize()
        peaks[name] = max(*seen, torch.cuda.max_memory_allocated())

    def trained(worker):
        worker.prepare_for_training()
        return [worker.train(make_batch(seed=seed), NLLLoss()).loss for seed in (1, 2)]

    with worker_of(settings, process) as worker:
        trained(worker)
        worker.offload_after_refit()  # from now on the staging buffers are there
        with peak_of("training"):
            trained(worker)
        worker.offload_after_refit()
        with peak_of("saving"):
            worker.save_checkpoint(tmp_path / "saved")
        with peak_of("exporting"):
            worker.export_hf(tmp_path / "hf")
        expected = trained(worker)
    with worker_of(settings, process) as worker:
        worker.offload_after_refit()
        with peak_of("loading"):
            worker.load_checkpoint(tmp_path / "saved")
        assert trained(worker) == expected
    # Training frees each gradient as its parameter is updated: what else is there at once differs by a tensor.
    largest = max(4 * parameter.numel() for parameter in make_qwen3(0, config).parameters())
    assert max(peaks.values()) <= peaks["training"] + largest, peaks


def test_running_out_of_memory_leaves_a_snapshot_and_says_what_was_where(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    make_qwen3(seed=0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    snapshots = tmp_path / "snapshots"
    settings = make_settings(folder, precision="bfloat16", memory_snapshot_dir=str(snapshots))
    worker = PolicyWorker(settings, ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0"), False)
    try:
        worker.prepare_for_training()
        worker.train(make_batch(), NLLLoss())  # NCCL sets itself up here, and would fail with an error of its own below
        torch.cuda.empty_cache()
        hog = torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device="cuda")
        wide = make_batch(num_rows=8, width=900)
        with pytest.raises(UserError, match=r"in a training pass .* with params [0-9.]+ GiB") as raised:
            worker.train(wide, NLLLoss())
        del hog
        assert "lower policy.train_micro_batch_size" in str(raised.value)
        assert (snapshots / "rank_0.pickle").stat().st_size > 0
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        worker.shutdown()
        torch.cuda.empty_cache()  # the hog's block: a later test would divide it, and hold all of it with its last part


def test_what_sending_takes_of_the_gpu_is_known_after_the_first_refit(tmp_path):
    make_qwen3(seed=0).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    settings = make_settings(tmp_path, precision="bfloat16")
    worker = PolicyWorker(settings, process, keep_reference=False)
    try:
        worker.prepare_for_lp_inference()
        known_bytes, bucket_bytes = [], []
        for _ in range(3):
            known_bytes.append(worker.refit_work_bytes())
            worker.offload_before_refit()
            worker.start_refit()
            bucket_bytes.append(worker.next_bucket().num_bytes)
            while not worker.next_bucket().is_last:
                pass
            worker.offload_after_refit()
        assert known_bytes[0] == 0
        assert bucket_bytes[0] < known_bytes[1] <= known_bytes[2]
        # Not what every worker has on the GPU, such as the buffers of copies.
        assert known_bytes[2] < STAGING_BYTES
    finally:
        worker.shutdown()
