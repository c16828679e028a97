"""What only the Megatron backend has: masters, gradient buffers, several forms of the optimizer. One rank on CPU."""

import gc
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from policy_cases import (
    NLL,
    ONE_RANK,
    assert_equal,
    full_optimizer,
    full_params,
    hf_logprobs,
    make_batch,
    make_megatron_settings,
    make_settings,
    save_family,
    worker_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.backends.megatron.optim import sub_optimizers
from nemo_offload_rl.backends.megatron.optimizer_spec import OPTIMIZERS, optimizer_spec
from nemo_offload_rl.backends.megatron.state import MASTER
from nemo_offload_rl.backends.megatron.streaming import StreamedStates
from nemo_offload_rl.backends.ranks import max_over_ranks, sum_over_ranks
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronOptimizerConfig
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency.table.groups import storage_key, unique_storages

BFLOAT16 = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}
# Changes, and bytes of masters and states for each parameter.
FLAVOURS = {
    "fp32": ({}, 8),
    "fp32, not sharded": ({"use_distributed_optimizer": False}, 8),
    "bf16": (BFLOAT16, 12),
    "bf16, not sharded": ({**BFLOAT16, "use_distributed_optimizer": False}, 12),
    "bf16, gradients too": ({**BFLOAT16, "grad_reduce_in_fp32": False}, 12),
    "sgd": ({**BFLOAT16, "sgd": True, "use_distributed_optimizer": False}, 8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_family(path, "qwen3-tied")
    return path


def make_worker(folder, *, sgd=False, **changes):
    settings = make_settings(folder, backend="megatron", **changes)
    if sgd:
        cfg = settings.megatron_cfg
        settings = replace(settings, megatron_cfg=replace(cfg, optimizer=replace(cfg.optimizer, optimizer="sgd")))
    return worker_of(settings, ONE_RANK)


def offload(worker):
    worker.offload_before_refit()
    worker.offload_after_refit()


def train_and_cycle(worker, seeds, *, cycled=True):
    results = []
    for seed in seeds:
        if cycled:
            offload(worker)
            worker.prepare_for_lp_inference()
            worker.get_logprobs(make_batch(seed=seed))
        worker.prepare_for_training()
        results.append(worker.train(make_batch(seed=seed), NLL()))
    return results, full_params(worker), full_optimizer(worker)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_form_of_the_optimizer_leaves_whole_and_comes_back_bit_by_bit(folder, tmp_path, flavour):
    changes, bytes_per_parameter = FLAVOURS[flavour]
    with make_worker(folder, **changes) as worker:
        expected, params, optimizer = train_and_cycle(worker, range(4), cycled=False)
    with make_worker(folder, **changes) as worker:
        sizes = worker._backend.expected_bytes()
        results, *_ = train_and_cycle(worker, range(2))
        num_parameters = sum(parameter.numel() for parameter in params.values())
        spec = optimizer_spec(worker._backend._cfg.optimizer)
        assert spec.bytes_per_element(COMPUTE_DTYPES[worker._settings.precision]) == bytes_per_parameter
        kept = {name.rpartition("/")[2] for name, tensor in optimizer.items() if tensor.dim() > 0}
        assert kept - {"master"} == set(spec.states)
        on_device = worker.residency.device_bytes()["optimizer"]  # small states are joined, each in whole units
        assert bytes_per_parameter * num_parameters <= on_device <= sizes["optimizer"]
        offload(worker)
        assert set(worker.residency.device_bytes().values()) == {0}
        on_host = worker.residency.host_bytes()
        for name in ("params", "optimizer"):
            assert on_host[name] <= sizes[name] < 1.05 * on_host[name]
        worker.save_checkpoint(tmp_path / "saved")
    with make_worker(folder, **changes) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        more, *found = train_and_cycle(worker, range(2, 4))
        assert results + more == expected
        assert_equal(found[0], params)
        assert_equal(found[1], optimizer)


@pytest.mark.parametrize("flavour", ["fp32", "bf16"])
@pytest.mark.parametrize(("fraction", "rest_stays"), [(0.5, False), (0.5, True), (1.0, False)])
def test_states_and_masters_that_stream_in_parts_change_no_bit(folder, flavour, fraction, rest_stays):
    changes, _ = FLAVOURS[flavour]
    with make_worker(folder, **changes) as worker:
        expected = train_and_cycle(worker, range(3), cycled=False)
    streamed = {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.25}
    if rest_stays:
        streamed["residency_overrides"] = {"optimizer": "device"}
    with make_worker(folder, **changes, **streamed, offload_optimizer_states_fraction=fraction) as worker:
        found = train_and_cycle(worker, range(3))
        assert found[0] == expected[0]
        assert_equal(found[1], expected[1])
        assert_equal(found[2], expected[2])
        on_device = worker.residency.device_bytes()
        parts = [size for name, size in on_device.items() if "part" in name]
        assert len(parts) > 1 and set(parts) == {0}
        assert (on_device["optimizer"] > 0) == (fraction < 1.0)
        groups = worker._backend._streamed.groups()
        states = [(name, tensor) for group in groups for name, tensor in group.tensors() if not name.endswith(MASTER)]
        assert len(unique_storages(states)) < len(states) / 2  # they are joined
        offload(worker)
        assert (worker.residency.device_bytes()["optimizer"] > 0) == rest_stays
        assert (worker.residency.host_bytes().get("optimizer", 0) > 0) == (fraction < 1.0 and not rest_stays)


class _Reads(TorchDispatchMode):
    """Which tensors the host reads."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.addresses.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def test_once_states_are_leaving_the_norm_is_not_read_from_the_device_behind_their_copies(folder, monkeypatch):
    """With Transformer Engine Megatron's norm is a tensor of the device, and so it is here."""

    def scale(chunk_size, overflow, lists, factor):
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", scale)
    streamed = {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.25}
    with make_worker(folder, **streamed) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(), NLL())
        worker.forward_backward(make_batch(seed=1), NLL())
        reads, copy_out = _Reads(), worker.residency._device.copy_out

        def watched(copies):
            reads.addresses.clear()
            return copy_out(copies)

        monkeypatch.setattr(worker.residency._device, "copy_out", watched)
        with reads:
            result = worker.optim_step()
        norm = worker._backend._optimizer.get_grad_norm()
        assert isinstance(norm, torch.Tensor)
        assert result.grad_norm == float(norm) > 0
        assert norm.data_ptr() not in reads.addresses


def test_a_rank_alone_reads_nothing_from_its_device_for_sums_over_ranks(folder):
    with make_worker(folder):
        group, device = parallel.data_parallel_group(), torch.device("meta")  # which has nothing to read
        assert sum_over_ranks([1, 2.5], group, device) == [1.0, 2.5]
        assert max_over_ranks(3, group, device) == 3


def test_an_optimizer_whose_update_of_a_part_needs_the_others_does_not_stream(folder):
    with make_worker(folder) as worker:
        backend = worker._backend
        cfg = replace(backend._cfg.optimizer, offload_optimizer_states=True)
        with pytest.raises(
            ConfigError,
            match="optimizer is adam, whose update of one part of the parameters needs the others; set it to",
        ):
            StreamedStates(backend._optimizer, cfg, replace(optimizer_spec(cfg), is_elementwise=False), {})


@pytest.mark.parametrize("ends", [(None, None), (3, None), (None, 4), (2, 2)])
def test_a_plan_divides_layers_over_stages_as_megatron_does(ends):
    first, last = ends
    num_layers = 6 + sum(3 if end is None else end for end in ends)
    sizes = {
        "pipeline_model_parallel_size": 4,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
    }
    plain = {"hidden_size": 8, "num_attention_heads": 2, "pipeline_dtype": torch.float32}
    config = TransformerConfig(num_layers=num_layers, **plain, **sizes)
    expected = tuple(get_num_layers_to_build(config, pp_rank=rank) for rank in range(4))
    assert replace(make_megatron_settings(), **sizes).layers_of_stages(num_layers) == expected


def test_every_optimizer_that_can_be_chosen_has_its_spec():
    assert set(get_args(get_type_hints(MegatronOptimizerConfig)["optimizer"])) == set(OPTIMIZERS)


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 8), (torch.bfloat16, 10), (torch.float16, 12)])
def test_a_precision_aware_spec_has_the_bits_that_bfloat16_lacks_and_whole_masters_of_float16(dtype, num_bytes):
    """Only Transformer Engine's Adam is precision-aware, and that needs a GPU: see test_megatron_gpu.py."""
    cfg = replace(make_settings("model", backend="megatron").megatron_cfg.optimizer, use_precision_aware_optimizer=True)
    assert optimizer_spec(cfg).bytes_per_element(dtype) == num_bytes
    in_16_bits = replace(cfg, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    assert optimizer_spec(in_16_bits).bytes_per_element(dtype) == num_bytes - 4


def test_nothing_that_training_made_stays_outside_of_the_groups(folder):
    """Storages over 64 KiB that are alive after an offload and were not before the worker was made."""

    def alive():
        gc.collect()
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        return {storage_key(t.untyped_storage()): t for t in tensors if t.untyped_storage().nbytes() > 64 << 10}

    before = alive().keys()
    with make_worker(folder, **BFLOAT16) as worker:
        train_and_cycle(worker, range(2))
        offload(worker)
        host_bytes = worker.residency.host_bytes()
        left = [found for key, found in alive().items() if key not in before]
    # The arena itself, which holds everything.
    assert sum(tensor.untyped_storage().nbytes() for tensor in left) < 1.05 * sum(host_bytes.values()), left


def test_gradient_buffers_come_back_zeroed_with_their_views(folder):
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        module = worker._backend._chunks[0].module
        views = {name: parameter.main_grad for name, parameter in module.named_parameters()}
        worker.forward_backward(make_batch(), NLL())
        assert any(view.any() for view in views.values())
        worker.zero_grad()
        offload(worker)
        assert worker.residency.device_bytes()["grads"] == 0
        worker.prepare_for_training()
        for name, parameter in module.named_parameters():
            assert parameter.main_grad is views[name]
            assert not views[name].any()


def test_bfloat16_models_are_scored_and_sent_in_bfloat16_and_updated_through_fp32_masters(folder):
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    batch = make_batch()
    with make_worker(folder, **BFLOAT16, lr=1e-5) as worker:
        worker.prepare_for_lp_inference()
        torch.testing.assert_close(worker.get_logprobs(batch), hf_logprobs(half, batch).detach(), rtol=0, atol=0.2)
        assert {spec.dtype for spec in worker._backend.weight_specs()} == {torch.bfloat16}
        stored = {name: tensor.clone() for name, tensor in half.state_dict().items() if name != "lm_head.weight"}
        assert_equal(full_params(worker), stored)
        worker.prepare_for_training()
        # One step is too small for bfloat16 to see in most places; the masters add them up.
        worker.train(batch, NLL())
        after_one = full_params(worker)
        worker.prepare_for_training()
        for _ in range(30):
            worker.train(batch, NLL())
        after_many = full_params(worker)

        def share_changed(params):
            return sum(int((params[n] != stored[n]).sum()) for n in stored) / sum(t.numel() for t in stored.values())

        assert share_changed(after_one) < 0.2 < share_changed(after_many)
        masters = {t.dtype for n, t in full_optimizer(worker).items() if n.endswith("master")}
        assert masters == {torch.float32}


def test_experts_of_a_bfloat16_model_are_sent_stacked(tmp_path):
    """Such a model has one wrapper more than one of float32."""
    own = save_family(tmp_path, "qwen3-moe").to(torch.bfloat16).state_dict()
    with make_worker(tmp_path, **BFLOAT16) as worker:
        sent = {name: tensor.clone() for name, tensor in worker.named_weights()}
    stacked = [name for name in own if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacked) > 0
    for name in stacked:
        assert torch.equal(sent[name], own[name]), name


def test_steps_that_an_optimizer_counts_in_its_groups_are_resumed(folder, tmp_path):
    """Transformer Engine's Adam has no count in a group before its first step, and begins at 1 without one."""
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(), NLL())
        (inner,) = {id(m.optimizer): m.optimizer for m in sub_optimizers(worker._backend._optimizer)}.values()
        for group in inner.param_groups:
            group["step"] = 7
        worker.save_checkpoint(tmp_path / "saved")
    with make_worker(folder) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        for mcore in sub_optimizers(worker._backend._optimizer):
            assert [group["step"] for group in mcore.optimizer.param_groups] == [7] * len(mcore.optimizer.param_groups)


def test_a_model_with_a_sliding_window_is_refused_when_it_is_built(folder):
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    with (
        pytest.raises(ConfigError, match=r"sliding window.*use policy\.dtensor_cfg"),
        make_worker(folder, hf_config_overrides=window),
    ):
        pass
