"""The form of the Megatron backend's rules."""

from collections.abc import Callable
from functools import wraps

from nemo_offload_rl.keys.master import PolicyRun, Rule
from nemo_offload_rl.keys.megatron import MegatronConfig

type MegatronRule = Callable[[PolicyRun, MegatronConfig], str | None]
"""From a run and its `policy.megatron_cfg` to one message (fact, reason, fix) or None."""


def for_megatron(*rules: MegatronRule) -> tuple[Rule[PolicyRun], ...]:
    """Return rules that are checked only if Megatron is the enabled backend."""

    def of_run(rule: MegatronRule) -> Rule[PolicyRun]:
        @wraps(rule)
        def checked(cfg: PolicyRun) -> str | None:
            backend = cfg.policy.backend
            return rule(cfg, backend) if isinstance(backend, MegatronConfig) else None

        return checked

    return tuple(map(of_run, rules))
