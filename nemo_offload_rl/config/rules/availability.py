"""What a later version will accept. These rules go first: the others would only add noise."""

from __future__ import annotations

from nemo_offload_rl.keys.master import Rule, RunConfig


def exactly_one_backend_is_enabled(cfg: RunConfig) -> str | None:
    """Exactly one of `dtensor_cfg` and `megatron_cfg` is enabled."""
    dtensor = cfg.policy.dtensor_cfg.enabled
    megatron = cfg.policy.megatron_cfg is not None and cfg.policy.megatron_cfg.enabled
    if dtensor == megatron:
        both = "both" if dtensor else "neither"
        return (
            f"{both} of policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are true, but one backend trains "
            "the model; enable exactly one"
        )
    return None


RULES: tuple[Rule[RunConfig], ...] = (exactly_one_backend_is_enabled,)
