"""Rules of the Megatron backend. All are checked before Ray starts, and none imports Megatron."""

from __future__ import annotations

from nemo_offload_rl.backends.megatron.rules import activations, adapters, model, optimizer
from nemo_offload_rl.backends.megatron.rules.section import megatron_section
from nemo_offload_rl.keys.master import PolicyRun, Rule


def megatron_trains_on_gpus(cfg: PolicyRun) -> str | None:
    """Megatron trains on GPUs."""
    if megatron_section(cfg) is None:
        return None
    if cfg.cluster.gpus_per_node == 0:
        return (
            "policy.megatron_cfg.enabled is true, but cluster.gpus_per_node is 0 and megatron-core needs GPUs; use "
            "policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false with policy.optimizer set"
        )
    return None


AVAILABILITY: tuple[Rule[PolicyRun], ...] = (megatron_trains_on_gpus,)
RULES: tuple[Rule[PolicyRun], ...] = (*model.RULES, *optimizer.RULES, *activations.RULES, *adapters.RULES)
