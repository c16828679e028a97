"""What the spec of a torch optimizer says, beside what the optimizer really keeps; Megatron's are in its tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_offload_rl.backends.dtensor.torch_optim import build_optimizer, optimizer_spec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.policy import OptimizerConfig
from nemo_offload_rl.protocols.optimizer import make_states


class Lion(Optimizer):
    """arXiv 2302.06675, with a momentum of 16 bits."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in (found for found in group["params"] if found.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                average = state["exp_avg"].float()
                parameter.sub_(group["lr"] * (0.9 * average + 0.1 * parameter.grad).sign())
                state["exp_avg"].copy_(0.99 * average + 0.01 * parameter.grad)


class MeanFree(Optimizer):
    """Its step needs the mean of a gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad - parameter.grad.mean()))


class Counting(Optimizer):
    """Keeps a number for each row."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(parameter.shape[0])


KEPT = {
    "torch.optim.AdamW": ({}, {"exp_avg": 4, "exp_avg_sq": 4}),
    "torch.optim.Adam": ({"amsgrad": True}, {"exp_avg": 4, "exp_avg_sq": 4, "max_exp_avg_sq": 4}),
    "torch.optim.SGD": ({}, {}),
    "torch.optim.SGD with momentum": ({"momentum": 0.9}, {"momentum_buffer": 4}),
    "torch.optim.Adagrad": ({}, {"sum": 4}),
    "torch.optim.RMSprop": ({}, {"square_avg": 4}),
    "torch.optim.RMSprop with a mean": ({"centered": True}, {"square_avg": 4, "grad_avg": 4}),
    "torch.optim.NAdam": ({}, {"exp_avg": 4, "exp_avg_sq": 4}),
    f"{__name__}.Lion": ({}, {"exp_avg": 2}),
    "nemo_offload_rl.optim.AdamW": ({}, {"exp_avg": 2, "exp_avg_sq": 2}),
    "nemo_offload_rl.optim.AdamW with one of 16 bits": ({"exp_avg_dtype": "float32"}, {"exp_avg": 4, "exp_avg_sq": 2}),
}


def settings_of(name: str, **kwargs) -> OptimizerConfig:
    return OptimizerConfig(name=name.partition(" ")[0], kwargs={"lr": 1e-2, **kwargs}, decay_norm_and_bias=True)


def some_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (7,), (2, 3, 4))]


def tensors_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("name", KEPT, ids=[name.rpartition(".")[2] for name in KEPT])
def test_a_spec_has_the_names_types_and_bytes_of_the_states_after_a_step(name):
    kwargs, expected = KEPT[name]
    spec = optimizer_spec(settings_of(name, **kwargs), on_gpu=False)
    assert {key: dtype.itemsize for key, dtype in spec.states.items()} == expected
    assert not spec.masters and spec.is_elementwise
    parameters = some_parameters()
    optimizer = build_optimizer(settings_of(name, **kwargs), parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        kept = {key: value for key, value in tensors_of(optimizer, parameter).items() if value.dim() > 0}
        assert {key: value.dtype for key, value in kept.items()} == spec.states
        found_bytes = sum(value.nbytes for value in kept.values())
        assert found_bytes == spec.bytes_per_element(parameter.dtype) * parameter.numel()


@pytest.mark.parametrize("name", KEPT, ids=[name.rpartition(".")[2] for name in KEPT])
def test_states_that_are_made_for_a_load_are_those_of_a_step_and_change_no_bit_of_a_parameter(name):
    kwargs, _ = KEPT[name]
    made, stepped = [build_optimizer(settings_of(name, **kwargs), some_parameters()) for _ in range(2)]
    parameters = made.param_groups[0]["params"]
    before = [parameter.detach().clone() for parameter in parameters]
    make_states(made, parameters[:2])
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))
    assert made.param_groups[0]["lr"] == 1e-2
    assert all(parameter.grad is None for parameter in parameters)
    for parameter in (reference := stepped.param_groups[0]["params"]):
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    for mine, other in zip(parameters[:2], reference[:2], strict=True):
        kept, expected = tensors_of(made, mine), tensors_of(stepped, other)
        assert {key: (value.dtype, value.shape) for key, value in kept.items()} == {
            key: (value.dtype, value.shape) for key, value in expected.items()
        }
    if name != "torch.optim.Adagrad":  # which makes its states with itself
        assert not made.state.get(parameters[2])


@pytest.mark.parametrize("cls", [MeanFree, Counting])
def test_an_optimizer_that_needs_more_than_a_shard_is_refused(cls):
    with pytest.raises(ConfigError, match="one shard of a parameter needs the others"):
        optimizer_spec(settings_of(f"{__name__}.{cls.__name__}"), on_gpu=False)
