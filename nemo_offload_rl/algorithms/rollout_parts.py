"""Parts of a run with rollouts."""

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
from nemo_offload_rl.protocols.engine import EngineGroup, PausingEngine
from nemo_offload_rl.utils.flops import ModelSpeed
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.memory_sampler import MemorySampler
from nemo_offload_rl.utils.progress import RunProgress


@dataclass(frozen=True, kw_only=True)
class EndpointParts:
    """Endpoint for agents: the engines, the model's name and the API key."""

    engine: Endpoint
    model: str
    api_key: str


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """Parts of a run with rollouts; `runs/rollouts.py` builds them.

    `restart_engine` takes the error that ended the engine. It raises that error if no restart is left, and otherwise
    restarts the engine and returns the owner of each worker process by its id. `pausing` is the same engine if it can
    take new weights in the middle of responses, else None; with `keeps_paused` it keeps unfinished responses through
    its sleep by itself. `planned` are metrics of the run's plan.
    """

    policy: Policy
    engine: EngineGroup
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
    keeps_paused: bool = False
    planned: Mapping[str, float] = field(default_factory=dict[str, float])
    profile_steps: Sequence[int] = ()
