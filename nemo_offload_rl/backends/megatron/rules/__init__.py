"""Rules of the Megatron backend. All are checked before Ray starts, and none imports Megatron."""

from nemo_offload_rl.backends.megatron.rules import activations, model, optimizer
from nemo_offload_rl.backends.megatron.rules.base import megatron_rules
from nemo_offload_rl.backends.megatron.supported import KEY
from nemo_offload_rl.keys.master import Rule, RunConfig
from nemo_offload_rl.keys.megatron import MegatronConfig


def megatron_trains_on_gpus(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """The Megatron backend needs GPUs."""
    if cfg.cluster.gpus_per_node == 0:
        return (
            f"{KEY}.enabled is true, but cluster.gpus_per_node is 0 and megatron-core needs GPUs; set "
            f"policy.dtensor_cfg.enabled=true {KEY}.enabled=false, and policy.optimizer"
        )
    return None


AVAILABILITY = megatron_rules(__name__)
RULES: tuple[Rule[RunConfig], ...] = (*model.RULES, *optimizer.RULES, *activations.RULES)
