"""The form of the Megatron backend's rules."""

from collections.abc import Callable
from functools import wraps

from nemo_offload_rl.keys.master import Rule, RunConfig, rules_in
from nemo_offload_rl.keys.megatron import MegatronConfig


def megatron_rules(module: str) -> tuple[Rule[RunConfig], ...]:
    """List a module's rules, of a run and its `policy.megatron_cfg`; they are checked only if Megatron is enabled."""
    return tuple(map(_of_run, rules_in(module, RunConfig, MegatronConfig)))


def _of_run(rule: Callable[[RunConfig, MegatronConfig], str | None]) -> Rule[RunConfig]:
    @wraps(rule)
    def checked(cfg: RunConfig) -> str | None:
        backend = cfg.policy.backend
        return rule(cfg, backend) if isinstance(backend, MegatronConfig) else None

    return checked
