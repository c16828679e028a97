"""RL post-training of language models on Ray, with training state moved at the speed of the link.

The names below are public: docs/reference/api.md lists them and says how they change. Each is imported when it is first
used, so that importing the package costs nothing.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from nemo_offload_rl.algorithms.losses import sequence_mean_share, token_mean_share
    from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, PreferenceBatch, TrainBatch
    from nemo_offload_rl.environments.agents import AgentTask
    from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score, Turn, Unscored
    from nemo_offload_rl.environments.sandbox import SandboxResult, run_python
    from nemo_offload_rl.errors import UserError
    from nemo_offload_rl.experience.types import Rollout
    from nemo_offload_rl.runs.distillation import run_distillation
    from nemo_offload_rl.runs.evaluation import run_eval
    from nemo_offload_rl.runs.loading import (
        load_distillation_config,
        load_dpo_config,
        load_eval_config,
        load_grpo_config,
        load_sft_config,
    )
    from nemo_offload_rl.runs.result import RunResult
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.runs.supervised import run_dpo, run_sft
    from nemo_offload_rl.utils.metric_sinks import MetricSink

_MODULES = {
    "run_grpo": "runs.rollouts",
    "run_sft": "runs.supervised",
    "run_dpo": "runs.supervised",
    "run_distillation": "runs.distillation",
    "run_eval": "runs.evaluation",
    "RunResult": "runs.result",
    "load_grpo_config": "runs.loading",
    "load_sft_config": "runs.loading",
    "load_dpo_config": "runs.loading",
    "load_distillation_config": "runs.loading",
    "load_eval_config": "runs.loading",
    "AgentTask": "environments.agents",
    "Environment": "environments.interfaces",
    "Observation": "environments.interfaces",
    "Response": "environments.interfaces",
    "Score": "environments.interfaces",
    "Turn": "environments.interfaces",
    "Unscored": "environments.interfaces",
    "run_python": "environments.sandbox",
    "SandboxResult": "environments.sandbox",
    "LossNorm": "data.batch",
    "PolicyGradientBatch": "data.batch",
    "PreferenceBatch": "data.batch",
    "TrainBatch": "data.batch",
    "sequence_mean_share": "algorithms.losses",
    "token_mean_share": "algorithms.losses",
    "Rollout": "experience.types",
    "MetricSink": "utils.metric_sinks",
    "UserError": "errors",
}

__all__ = [
    "run_grpo", "run_sft", "run_dpo", "run_distillation", "run_eval", "RunResult",
    "load_grpo_config", "load_sft_config", "load_dpo_config", "load_distillation_config", "load_eval_config",
    "Environment", "Response", "Turn", "Score", "Unscored", "Observation", "AgentTask", "run_python", "SandboxResult",
    "TrainBatch", "PolicyGradientBatch", "PreferenceBatch", "LossNorm", "token_mean_share", "sequence_mean_share",
    "Rollout", "MetricSink", "UserError",
]  # fmt: skip


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
