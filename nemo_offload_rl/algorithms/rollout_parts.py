"""What a run with rollouts is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper
from nemo_offload_rl.data.loader import BatchLoader
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment
from nemo_offload_rl.environments.interfaces import Environment
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.experience.agent_rollouts import Endpoint
from nemo_offload_rl.experience.rollouts import Decode, Turns
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.engine import GenerationEngine, PausingEngine
from nemo_offload_rl.utils.flops import ModelSpeed
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MemorySampler
from nemo_offload_rl.utils.progress import RunProgress


@dataclass(frozen=True, kw_only=True)
class EndpointParts:
    """What agents talk to: the engines, the model's name there, and what they ask for."""

    engine: Endpoint
    model: str
    api_key: str


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What a run with rollouts is made of; `runs/rollouts.py` builds it.

    `restart_engine` takes the error after which the engine is needed again; it raises that error if no restart is left,
    and otherwise returns the owner of each process from then on. `pausing` is the engine again, where it can be given
    weights in the middle of responses.
    """

    policy: Policy
    engine: GenerationEngine
    restart_engine: Callable[[UserError], Mapping[int, str]]
    environments: Mapping[str, Environment | AgentEnvironment]
    loader: BatchLoader[Prompt]
    validation_prompts: Sequence[Prompt]
    decode: Decode
    turns: Turns
    pad_id: int
    width_multiple: int
    checkpoints: CheckpointKeeper
    logger: RunLogger
    progress: RunProgress
    num_samples_to_print: int
    memory: MemorySampler
    speed: ModelSpeed | None
    endpoint: EndpointParts | None = None
    overlong_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    pausing: PausingEngine | None = None
