"""How much room buffers need while a model is made. That parameters wait on the host is tested on GPUs."""

import psutil
import pytest
import torch
from policy_cases import ONE_RANK, assert_equal, full_params, make_settings, save_family, worker_of
from torch import nn

from nemo_offload_rl.backends.megatron import model
from nemo_offload_rl.backends.megatron.upstream import storages

BFLOAT16 = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}


@pytest.mark.parametrize(("grads_in_fp32", "bytes_a_parameter"), [(True, 6), (False, 4)])
def test_the_buffers_are_those_that_megatron_makes(tmp_path, grads_in_fp32, bytes_a_parameter):
    save_family(tmp_path, "qwen3")
    settings = make_settings(tmp_path, backend="megatron", grad_reduce_in_fp32=grads_in_fp32, **BFLOAT16)
    with worker_of(settings, ONE_RANK) as worker:
        chunk = worker._backend._chunks[0]
        trained = list(chunk.module.parameters())
        expected = storages.buffer_bytes(trained, grads_in_fp32=grads_in_fp32)
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
        made = sum(buffer.param_data.nbytes + buffer.grad_data.nbytes for buffer in buffers)
    assert expected == bytes_a_parameter * sum(parameter.numel() for parameter in trained)
    assert expected <= made < 1.05 * expected  # each bucket is padded


def test_a_model_whose_parameters_were_given_other_memory_before_it_was_wrapped_is_the_same(tmp_path, monkeypatch):
    save_family(tmp_path, "qwen3-tied")
    settings = make_settings(tmp_path, backend="megatron", **BFLOAT16)
    with worker_of(settings, ONE_RANK) as worker:
        expected = full_params(worker)
    moved = []

    def wrapped(config, module, *, grads_in_fp32):
        found = storages.Float16Module(config, module)
        moved.extend(found.parameters())
        for parameter in moved:
            parameter.data = parameter.data.clone()
        storages.move_to_host(moved)
        return found

    monkeypatch.setattr(model, "wrapped_for_16_bits", wrapped)
    with worker_of(settings, ONE_RANK) as worker:
        assert_equal(full_params(worker), expected)
    assert moved


def test_memory_of_many_small_parameters_is_the_system_s_again_once_they_have_other_memory():
    resident = psutil.Process().memory_info
    value = torch.zeros(1, dtype=torch.bfloat16)
    parameters = [nn.Parameter(value.expand(1 << 20), requires_grad=False) for _ in range(400)]
    torch.empty(16 << 20, dtype=torch.uint8)  # once such a size was freed, malloc takes it from its heap
    before_bytes = resident().rss
    storages.move_to_host(parameters)
    held_bytes = resident().rss - before_bytes
    others = []
    for parameter in parameters:
        others.append(torch.ones(256))  # as everything that lives on above what is freed
        parameter.data = value
    assert held_bytes > 750 << 20
    assert resident().rss - before_bytes < 100 << 20


def test_parameters_that_move_stay_the_same_objects_with_the_same_values():
    parameters = [nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(4))]
    before = [(id(parameter), parameter.detach().clone()) for parameter in parameters]
    storages.move_to_host(parameters)
    for parameter, (identity, value) in zip(parameters, before, strict=True):
        assert id(parameter) == identity and torch.equal(parameter, value) and parameter.requires_grad
