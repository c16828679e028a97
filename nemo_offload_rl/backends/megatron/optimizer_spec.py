"""What megatron-core's optimizers keep, from the settings alone. Imports torch and no library of Megatron's.

Rules and sizes ask it before anything starts, the backend for what it has built. The facts are those of megatron-core
0.19.2 with Transformer Engine's FusedAdam and FusedSGD, or torch's own where that is not installed; its other
optimizers (`megatron.core.optimizer.emerging_optimizers`) need a package that is no requirement here.
"""

from __future__ import annotations

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
        states: Types by name of what it keeps for each parameter.
        is_elementwise: See `OptimizerSpec`.
        can_be_sharded: The distributed optimizer takes it where it is not on the host.
        can_be_precision_aware: It can update a bfloat16 model and keep the 16 bits that the model lacks.
    """

    states: Mapping[str, torch.dtype]
    is_elementwise: bool
    can_be_sharded: bool
    can_be_precision_aware: bool


# By the key `optimizer`.
OPTIMIZERS: Mapping[str, MegatronOptimizer] = {
    "adam": MegatronOptimizer(
        states={"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
        is_elementwise=True,
        can_be_sharded=True,
        can_be_precision_aware=True,
    ),
    # Without momentum torch's keeps nothing, Transformer Engine's the same as with it.
    "sgd": MegatronOptimizer(
        states={"momentum_buffer": torch.float32},
        is_elementwise=True,
        can_be_sharded=False,
        can_be_precision_aware=False,
    ),
}


def optimizer_spec(settings: MegatronOptimizerConfig) -> OptimizerSpec:
    """What the optimizer of `policy.megatron_cfg.optimizer` keeps."""
    optimizer = OPTIMIZERS[settings.optimizer]
    masters = dict.fromkeys(_HALF, torch.float32)
    if settings.use_precision_aware_optimizer:
        masters[torch.bfloat16] = torch.int16  # the bits that the parameter lacks
    states = dict(optimizer.states)
    if optimizer.can_be_precision_aware and settings.use_precision_aware_optimizer:
        states |= {name: getattr(torch, getattr(settings, f"{name}_dtype")) for name in states}
    return OptimizerSpec(states=states, masters=masters, is_elementwise=optimizer.is_elementwise)


def names_of(can: Callable[[MegatronOptimizer], bool]) -> str:
    """Values of the key `optimizer` that stand for such optimizers, for messages."""
    return " or ".join(name for name, optimizer in OPTIMIZERS.items() if can(optimizer))
