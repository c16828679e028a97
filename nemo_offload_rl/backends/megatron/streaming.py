"""Optimizer states and masters that are on the device only for their own update (`offload_optimizer_states`).

Megatron's distributed optimizer updates all parameters at once and then copies all masters into the parameter buffers.
During a step, this module replaces its inner optimizer by one that updates part after part, and copies each part's
masters while they are on the device. Megatron still computes the norm, clips, and gathers parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice, starmap
from typing import Any

from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from nemo_offload_rl.backends.megatron import state
from nemo_offload_rl.backends.megatron.optim import sub_optimizers
from nemo_offload_rl.backends.megatron.upstream.storages import join_states
from nemo_offload_rl.backends.optimizer_parts import NamedTensors, OptimizerParts, divide_optimizer, num_streamed
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronOptimizerConfig
from nemo_offload_rl.protocols.optimizer import OptimizerSpec
from nemo_offload_rl.residency import OPTIMIZER, StateGroup

# Attributes of shards and parameters that the distributed optimizer pairs when it copies masters into parameters.
_PAIRED = (("shard_fp32_from_float16_groups", "model_float16_groups"), ("shard_fp32_groups", "model_fp32_groups"))


class StreamedStates:
    """Division of the optimizer's states into streamed parts, and the step that streams them.

    Args:
        optimizer: Megatron's optimizer.
        cfg: Settings of the streamed share and the size of its parts.
        spec: Spec of the optimizer.
        state_bytes: Bytes of masters and states by parameter of an inner optimizer.

    Raises:
        ConfigError: States are to be streamed, but the optimizer cannot update one part alone.
    """

    def __init__(
        self,
        optimizer: Any,
        cfg: MegatronOptimizerConfig,
        spec: OptimizerSpec,
        state_bytes: Mapping[Tensor, int],
    ) -> None:
        if cfg.offload_optimizer_states and not spec.is_elementwise:
            raise ConfigError(
                f"policy.megatron_cfg.optimizer.offload_optimizer_states is true, but optimizer is {cfg.optimizer}, "
                "whose update of one part of the parameters needs the others; set it to false"
            )
        chunk_mib = cfg.offload_optimizer_states_chunk_mib
        self._parts: list[tuple[Any, OptimizerParts]] = []
        first_index = 0
        for index, mcore in enumerate(sub_optimizers(optimizer)):
            if mcore.is_stub_optimizer:
                continue
            updated = state.updated_parameters(mcore)
            named = [(f"optimizer{index}/{name}", parameter) for name, parameter in updated if parameter in state_bytes]
            parts = divide_optimizer(
                named,
                lambda parameter: state_bytes[parameter],
                num_streamed([state_bytes[parameter] for _, parameter in named], cfg.streamed_share),
                None if chunk_mib is None else int(chunk_mib * 2**20),
                first_index,
            )
            self._parts.append((mcore, parts))
            first_index += len(parts.parts)
        self._part_of = {
            parameter: name for _, parts in self._parts for name, some in parts.parts.items() for _, parameter in some
        }
        self._joined: set[str] = set()
        self.rest_bytes = sum(state_bytes[p] for _, parts in self._parts for _, p in parts.rest)
        self.streamed_bytes = sum(state_bytes.values()) - self.rest_bytes

    @property
    def group_names(self) -> list[str]:
        """Names of the group of states that stay through a step, then of each part's group."""
        return list(self._members())

    def group_of(self, parameter: Tensor) -> str:
        """Return the name of the group with the states of a parameter of an inner optimizer."""
        return self._part_of.get(parameter, OPTIMIZER)

    def groups(self) -> list[StateGroup]:
        """Return one group of the states that stay through a step, then one group for each part."""
        return [
            StateGroup(name, lambda mine=mine: chain.from_iterable(starmap(state.optimizer_tensors, mine)))
            for name, mine in self._members().items()
        ]

    def _members(self) -> dict[str, list[tuple[Any, NamedTensors]]]:
        """Return the parameters of each group, by the optimizer that updates them."""
        members = {OPTIMIZER: [(mcore, parts.rest) for mcore, parts in self._parts]}
        for mcore, parts in self._parts:
            members |= {name: [(mcore, some)] for name, some in parts.parts.items()}
        return members

    @contextmanager
    def streaming(self, streamed: Iterator[str]) -> Iterator[None]:
        """Let a step of Megatron's optimizer update part by part; `streamed` names each part when it has arrived."""
        with ExitStack() as stack:
            in_parts = [
                stack.enter_context(_stood_in_for(mcore, parts, streamed, self._join))
                for mcore, parts in self._parts
                if parts.parts
            ]
            yield
        for mcore, parts in self._parts:
            self._join(mcore.optimizer, parts.rest)
        if any(stand_in.has_stepped for stand_in in in_parts):  # a float16 step that overflowed is skipped
            # Asking for another part lets the last one leave.
            for name in streamed:
                raise RuntimeError(f"the states of {name} came, but no optimizer updates them")

    def _join(self, optimizer: Any, members: NamedTensors) -> None:
        """Join small states after these parameters' first update, except those of Megatron's hybrid optimizer.

        States are joined once; a group's first parameter identifies it.
        """
        if not members or members[0][0] in self._joined or isinstance(optimizer, HybridDeviceOptimizer):
            return
        if join_states(optimizer, (parameter for _, parameter in members)):
            self._joined.add(members[0][0])


class _InParts:
    """Replacement for the torch optimizer inside a distributed optimizer."""

    def __init__(
        self,
        mcore: Any,
        parts: OptimizerParts,
        streamed: Iterator[str],
        join: Callable[[Any, NamedTensors], None],
    ) -> None:
        self._mcore = mcore
        self._join = join
        self._inner = mcore.optimizer
        self._parts = parts
        self._streamed = streamed
        self.has_stepped = False
        self._pairs = [(getattr(mcore, main), getattr(mcore, model)) for main, model in _PAIRED]
        self._places = [_places(*pair) for pair in self._pairs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self) -> None:
        self.has_stepped = True
        mine = islice(self._streamed, len(self._parts.parts))
        self._parts.step(self._inner, mine, self._copy_masters)
        # Megatron copies all listed masters next; list none, since all are copied and have left the device.
        self._list_pairs([([], []) for _ in _PAIRED])

    def restore(self) -> None:
        self._mcore.optimizer = self._inner
        self._list_pairs(self._pairs)

    def _copy_masters(self, members: NamedTensors) -> None:
        pairs = zip(self._pairs, self._places, strict=True)
        self._list_pairs([_only(len(main), places, members) for (main, _), places in pairs])
        self._mcore._copy_main_params_to_model_params()
        self._join(self._inner, members)

    def _list_pairs(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        for (main_name, model_name), (main, model) in zip(_PAIRED, pairs, strict=True):
            setattr(self._mcore, main_name, main)
            setattr(self._mcore, model_name, model)


@contextmanager
def _stood_in_for(
    mcore: Any, parts: OptimizerParts, streamed: Iterator[str], join: Callable[[Any, NamedTensors], None]
) -> Iterator[_InParts]:
    in_parts = _InParts(mcore, parts, streamed, join)
    mcore.optimizer = in_parts
    try:
        yield in_parts
    finally:
        in_parts.restore()


def _places(main_groups: Any, model_groups: Any) -> dict[int, tuple[int, Any, Any]]:
    """Return for each shard the number of its group, the shard and its parameter, by the shard's id."""
    return {
        id(main): (number, main, model)
        for number, pairs in enumerate(zip(main_groups, model_groups, strict=True))
        for main, model in zip(*pairs, strict=True)
    }


def _only(
    num_groups: int, places: Mapping[int, tuple[int, Any, Any]], members: NamedTensors
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the shards of `members`, and the parameters that they belong to, by the optimizer's groups."""
    mains: list[list[Any]] = [[] for _ in range(num_groups)]
    models: list[list[Any]] = [[] for _ in range(num_groups)]
    for _, parameter in members:
        if (place := places.get(id(parameter))) is not None:
            number, main, model = place
            mains[number].append(main)
            models[number].append(model)
    return mains, models
