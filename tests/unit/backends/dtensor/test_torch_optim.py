from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from policy_cases import (
    NLL,
    NO_LORA,
    assert_equal,
    full_grads,
    full_optimizer,
    full_params,
    make_batch,
    one_rank_worker,
    save_family,
    torch_optimizer,
)
from torch import nn
from transformers import Trainer

from nemo_offload_rl.backends.dtensor.torch_optim import (
    build_optimizer,
    class_by_name,
    optimizer_spec,
    param_groups,
)
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.residency import local_tensor

ADAMW = torch_optimizer("AdamW", lr=1.0)
# Every optimizer that torch has, and why it cannot train; a new one in torch comes up in the test below.
REFUSED = {
    "Adafactor": "in-place operations that require placement changes",
    "LBFGS": "closure",
    "Muon": "2D parameters",
    "Rprop": "sharding strategy",
    "SparseAdam": "dense gradients",
}
STATES = {"SGD": 0, "Adagrad": 1, "ASGD": 1, "RMSprop": 1}
OPTIMIZERS = [name for name in torch.optim.__all__ if inspect.isclass(getattr(torch.optim, name))]
VARIANTS = [
    *[(name, {}, STATES.get(name, 2)) for name in OPTIMIZERS if name not in {*REFUSED, "Optimizer"}],
    ("SGD", {"momentum": 0.9}, 1),
    ("AdamW", {"amsgrad": True}, 3),
    ("RMSprop", {"centered": True, "momentum": 0.9}, 3),
    ("nemo_offload_rl.optim.AdamW", {}, 1),  # two of half the size
    ("nemo_offload_rl.optim.AdamW", {"exp_avg_dtype": "float32", "fused": True}, 1.5),
]


def test_a_driver_on_a_machine_with_gpus_tries_an_optimizer_without_asking_them(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append("context") or False)
    assert optimizer_spec(ADAMW, on_gpu=True).bytes_per_element(torch.float32) == 8
    assert not asked
    (parameter,) = made = [nn.Parameter(torch.ones(2))]
    parameter.grad = torch.ones(2)
    build_optimizer(ADAMW, made).step()
    assert asked  # what it would have done


def test_a_gpu_gets_the_fused_kernel_where_there_is_one_and_nothing_else_is_chosen():
    def kernel(name, **kwargs):
        made = build_optimizer(torch_optimizer(name, lr=1.0, **kwargs), [nn.Parameter(torch.ones(2))], on_gpu=True)
        return made.param_groups[0].get("fused"), made.param_groups[0]["foreach"]

    assert kernel("AdamW") == kernel("SGD", fused=True) == (True, None)
    assert kernel("AdamW", foreach=True) == (None, True)
    assert kernel("AdamW", fused=False) == (False, None)
    assert kernel("RMSprop") == (None, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("optim") / "model"
    save_family(path, "qwen3-tied")
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_train_is_refused_before_anything_is_loaded(name):
    with pytest.raises(ConfigError, match=REFUSED[name]) as caught:
        optimizer_spec(torch_optimizer(name, lr=1e-3), on_gpu=False)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "num_states"), VARIANTS, ids=[f"{name}-{'-'.join(kwargs)}" for name, kwargs, _ in VARIANTS]
)
def test_every_other_optimizer_trains_streams_resumes_and_keeps_what_was_said(
    folder, tmp_path, name, kwargs, num_states
):
    settings = torch_optimizer(name, lr=1e-3, weight_decay=0.1, **kwargs, decay_norm_and_bias=False)
    assert optimizer_spec(settings, on_gpu=False).bytes_per_element(torch.float32) == 4 * num_states
    changes = {"optimizer": settings, "offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.05}
    plain: dict[str, nn.Parameter] = {}
    optimizers = []

    def step_both(worker, seed):
        """The same gradients for torch's own optimizer over plain tensors."""
        worker.prepare_for_training()
        worker.forward_backward(make_batch(seed=seed), NLL())
        if not optimizers:
            plain.update({key: nn.Parameter(value) for key, value in full_params(worker).items()})
            groups = [
                {"params": [value for key, value in plain.items() if "norm" not in key]},
                {"params": [value for key, value in plain.items() if "norm" in key], "weight_decay": 0.0},
            ]
            optimizers.append(class_by_name("name", settings.name, torch.optim.Optimizer)(groups, **settings.kwargs))
        for key, gradient in full_grads(worker).items():
            plain[key].grad = gradient
        optimizers[0].step()
        worker.optim_step()
        assert_equal(full_params(worker), {key: value.detach() for key, value in plain.items()})

    with one_rank_worker(folder, **changes) as worker:
        planned = worker._backend.expected_bytes()
        expected = sum(planned.values())
        trained = [local_tensor(parameter).numel() for _, parameter in worker._backend._parameters]
        own_bytes = int(sum(4 * num_states * count for count in trained))
        assert own_bytes <= expected - planned["params"] <= own_bytes + 512 * math.ceil(num_states) * len(trained) * 2
        for seed in range(2):
            step_both(worker, seed)
            worker.offload_before_refit()
            worker.offload_after_refit()
        assert worker.residency._arena.reserved_bytes == expected
        worker.save_checkpoint(tmp_path / "saved")
    with one_rank_worker(folder, **changes) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        step_both(worker, 2)


def test_a_run_goes_on_with_moments_of_another_type_and_from_an_optimizer_of_torch(folder, tmp_path):
    own = "nemo_offload_rl.optim.AdamW"
    in_fp32 = {"exp_avg_dtype": "float32", "exp_avg_sq_dtype": "float32"}

    def go_on(settings, load, save=None):
        """The optimizer's states as they are read, and the parameters after a step."""
        with one_rank_worker(folder, optimizer=settings) as worker:
            worker.prepare_for_training()
            if load is None:
                worker.train(make_batch(), NLL())
            else:
                worker.load_checkpoint(tmp_path / load)
            states = full_optimizer(worker)
            if save is not None:
                worker.save_checkpoint(tmp_path / save)
            worker.train(make_batch(seed=1), NLL())
            return states, full_params(worker)

    states, params = go_on(torch_optimizer("AdamW", lr=1e-3), None, "of torch")
    same_states, same_params = go_on(torch_optimizer(own, **in_fp32), "of torch")
    assert_equal(same_states, states)
    assert_equal(same_params, params)
    narrow, _ = go_on(torch_optimizer(own), "of torch", "of 16 bits")
    wide, _ = go_on(torch_optimizer("AdamW"), "of 16 bits")
    for name, value in states.items():
        kept = value if name.endswith("/step") else value.bfloat16()
        assert narrow[name].dtype == kept.dtype and torch.equal(narrow[name], kept)
        assert wide[name].dtype == torch.float32 and torch.equal(wide[name], kept.float())


@pytest.mark.parametrize("family", ["qwen2", "qwen3-tied", "llama-tied"])
def test_weight_decay_leaves_out_what_hugging_faces_trainer_leaves_out(tmp_path, family):
    model = save_family(tmp_path / "model", family)
    parameters = dict(model.named_parameters())
    settings = replace(ADAMW, decay_norm_and_bias=False)
    decayed, others = param_groups(settings, parameters.items())
    names = {id(parameter): name for name, parameter in parameters.items()}
    expected = parameters.keys() & Trainer.get_decay_parameter_names(None, model)  # it names a tied weight twice
    assert {names[id(parameter)] for parameter in decayed["params"]} == expected
    assert {names[id(parameter)] for parameter in others["params"]} == parameters.keys() - expected
    assert others["weight_decay"] == 0.0 and "weight_decay" not in decayed
    (whole,) = param_groups(ADAMW, parameters.items())
    assert whole == {"params": list(parameters.values())}


def test_adapters_are_one_group(folder):
    lora = replace(NO_LORA, enabled=True)
    with one_rank_worker(folder, optimizer=replace(ADAMW, decay_norm_and_bias=False), lora_cfg=lora) as worker:
        (group,) = worker._backend._optimizer.param_groups
        assert len(group["params"]) == len(worker._backend._parameters)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_how_a_step_is_computed_is_tried_where_the_run_computes_it(name):
    fused = torch_optimizer(name, lr=1e-3, fused=True)
    plain = torch_optimizer(name, lr=1e-3)
    assert optimizer_spec(fused, on_gpu=True) == optimizer_spec(plain, on_gpu=True)
