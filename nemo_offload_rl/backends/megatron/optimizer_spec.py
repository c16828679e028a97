"""States of megatron-core's optimizers, derived from settings alone. Imports torch, but no library of Megatron's.

Rules and size estimates use it before a run starts, and the backend for its optimizer. The facts are of megatron-core
0.19.2 with Transformer Engine's FusedAdam and FusedSGD, or with torch's optimizers if that is not installed. Its other
optimizers (`megatron.core.optimizer.emerging_optimizers`) need a package that is not required here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from nemo_offload_rl.keys.megatron import MegatronOptimizerConfig
from nemo_offload_rl.protocols.optimizer import OptimizerSpec

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MegatronOptimizer:
    """One of megatron-core's optimizers.

    Attributes:
        states: Types of the states of each parameter, by name.
        is_elementwise: See `OptimizerSpec`.
        can_be_sharded: The distributed optimizer supports it on the GPU.
        can_be_precision_aware: It can update a bfloat16 model and keep only the 16 bits that a master has in addition.
    """

    states: Mapping[str, torch.dtype]
    is_elementwise: bool
    can_be_sharded: bool
    can_be_precision_aware: bool


# By value of the key `optimizer`.
OPTIMIZERS: Mapping[str, MegatronOptimizer] = {
    "adam": MegatronOptimizer(
        states={"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
        is_elementwise=True,
        can_be_sharded=True,
        can_be_precision_aware=True,
    ),
    # Without momentum, torch's SGD keeps no state; Transformer Engine's always keeps it.
    "sgd": MegatronOptimizer(
        states={"momentum_buffer": torch.float32},
        is_elementwise=True,
        can_be_sharded=False,
        can_be_precision_aware=False,
    ),
}


def optimizer_spec(settings: MegatronOptimizerConfig) -> OptimizerSpec:
    """Return the states of the optimizer of `policy.megatron_cfg.optimizer`."""
    optimizer = OPTIMIZERS[settings.optimizer]
    masters = dict.fromkeys(_HALF, torch.float32)
    if settings.use_precision_aware_optimizer:
        masters[torch.bfloat16] = torch.int16  # the lower bits, which the parameter lacks
    states = dict(optimizer.states)
    if optimizer.can_be_precision_aware and settings.use_precision_aware_optimizer:
        states |= {name: getattr(torch, getattr(settings, f"{name}_dtype")) for name in states}
    return OptimizerSpec(states=states, masters=masters, is_elementwise=optimizer.is_elementwise)


def names_of(can: Callable[[MegatronOptimizer], bool]) -> str:
    """Return the values of the key `optimizer` whose optimizers satisfy `can`, for messages."""
    return " or ".join(name for name, optimizer in OPTIMIZERS.items() if can(optimizer))
