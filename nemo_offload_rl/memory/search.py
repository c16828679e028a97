"""Searches for other values of a run's keys: the cheapest changes that make it fit, and the fastest ones that fit.

Every trial is an account of the run with these values, so nothing is proposed that was not tried.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from nemo_offload_rl.keys.master import DistillationMasterConfig, GrpoMasterConfig, RolloutMasterConfig, RunConfig
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.memory.account import Account

_VLLM = "policy.generation.vllm_cfg"
_DTENSOR, _MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
MOST_ROWS = 128
_ROWS = (1, 2, 4, 8, 16, 32, 64, MOST_ROWS)
_SHARES = tuple(percent / 100 for percent in range(20, 95, 5))
# A change of a key costs at least this share of a step, so that keys change only where that pays.
_COST_OF_A_KEY = 0.002
# Smaller micro-batches are taken if a step takes at most this much longer. Of the choices that were run
# (docs/measurements/plans.md) 16 rows, planned 1.7 % faster than 8, were faster; 64, planned 1.3 % faster than 16, were
# slower than 8.
_NO_GAIN = 1.015
_MOST_ROUNDS = 6
_MOST_CHANGES = 3  # sets of changes to propose
_MOST_STARTS = 8  # ways that are looked for
_MOST_LAYOUTS = 2  # from which the search goes on


@dataclass(frozen=True)
class Trial:
    """Values of keys, and what the run would take with them.

    Attributes:
        options: The values that were chosen, each as overrides.
        overrides: `KEY=VALUE` of each key that differs from the run's.
        account: Account of the run with them.
        short_bytes: Bytes that a GPU lacks, summed over phases, and that a host lacks; 0 if the run fits.
        step_s: Seconds of a step; 0 if they are unknown, and of a run that does not fit.
        changes_numbers: The run computes other numbers.
        changes_machine: The run needs more GPUs.
    """

    options: frozenset[str]
    overrides: tuple[str, ...]
    account: Account
    short_bytes: int
    step_s: float
    changes_numbers: bool
    changes_machine: bool

    @property
    def fits(self) -> bool:
        """Tell whether memory suffices."""
        return self.short_bytes == 0

    @property
    def cost(self) -> tuple[int, float]:
        """Rank of the trial: by bytes that are short, then by seconds of all GPUs, or without them by their number."""
        by_keys = 1 + _COST_OF_A_KEY * len(self.overrides)
        return self.short_bytes, (self.step_s or 1.0) * self.account.cfg.cluster.world_size * by_keys


@dataclass(frozen=True)
class Judges:
    """Functions that judge an account.

    Attributes:
        is_allowed: Tells whether the rules allow its keys together.
        short_bytes: Counts the bytes that are missing, as in `Trial`.
        step_s: Estimates the seconds of a step; 0 if they are unknown.
    """

    is_allowed: Callable[[Account], bool]
    short_bytes: Callable[[Account], int]
    step_s: Callable[[Account], float]


@dataclass(frozen=True)
class Dimension:
    """Values that exclude each other, each as overrides of one or more keys.

    Attributes:
        options: Overrides of each value.
        changes_numbers: Another value changes what the run computes, such as the type of the optimizer's states.
        changes_machine: Another value needs another machine.
        is_layout: The values divide the model and its rows over the workers.
        is_of_passes: The value changes what passes need, so that nothing is known of it where passes are not counted.
        trains_less: Another value trains a part of the model only.
    """

    options: tuple[str, ...]
    changes_numbers: bool = False
    changes_machine: bool = False
    is_layout: bool = False
    is_of_passes: bool = False
    trains_less: bool = False


class Search:
    """Tries other values of a run's keys.

    Args:
        account: The run.
        judges: Judge an account.
        among: The values to try.
    """

    def __init__(self, account: Account, judges: Judges, among: Iterable[Dimension]) -> None:
        self._account, self.judges = account, judges
        self._tried: dict[frozenset[str], Trial] = {}
        self._allowed: dict[frozenset[str], bool] = {}
        self._dimensions = list(among)
        self.given = self._try(frozenset())

    def cheapest(self, count: int = _MOST_CHANGES) -> list[Trial]:
        """Find changes that make the run fit: single ones, then pairs, then larger sets.

        Changes that keep the run's numbers and its machine come before others, and those of a kind are in the order of
        their seconds.

        Returns:
            At most `count` trials that fit; empty if none was found. None has all changes of another one, unless it
            differs in the number of GPUs and there are fewer than `count` others.
        """
        found: list[Trial] = []
        for way in (_way, _way_and_gpus):
            for dimensions in self._tiers():
                found += self._of_tier(dimensions, found, count - len(found), way)
        return found

    def _of_tier(
        self,
        dimensions: Sequence[Dimension],
        found: Sequence[Trial],
        count: int,
        way: Callable[[Trial], frozenset[str]],
    ) -> list[Trial]:
        """Find at most `count` more trials, of other ways than those that were found."""
        mine: list[Trial] = []
        if self._completed(dimensions, frozenset()) is None:
            return mine
        for trial in itertools.chain(self._pairs(dimensions), self._sets(dimensions)):
            if len(mine) >= count:
                break
            if any(way(other) <= way(trial) for other in (*found, *mine)):
                continue
            tuned = self._tuned(trial, dimensions)
            if not any(way(other) <= way(tuned) for other in found):
                mine = [tuned, *(other for other in mine if not way(tuned) <= way(other))]
        return sorted(mine, key=lambda one: one.cost)

    def _tuned(self, trial: Trial, among: Sequence[Dimension]) -> Trial:
        """Choose other numbers for the changes of a trial where they are faster."""
        ways = set(map(self._way, trial.options))
        similar = (replace(one, options=tuple(it for it in one.options if self._way(it) in ways)) for one in among)
        return self._descend(trial, [one for one in similar if trial.options.intersection(one.options)])

    def _tiers(self) -> Iterator[list[Dimension]]:
        """Yield the dimensions that keep numbers and machine, those that keep one of the two, neither, and all."""
        whole = [one for one in self._dimensions if not one.trains_less]
        for numbers, machine in ((False, False), (True, False), (False, True), (True, True)):
            yield [one for one in whole if one.changes_numbers <= numbers and one.changes_machine <= machine]
        if len(whole) < len(self._dimensions):
            yield self._dimensions

    def _pairs(self, among: Sequence[Dimension]) -> Iterator[Trial]:
        """Yield the changes that are enough alone, then the pairs of changes that each free memory, fast ones first."""
        singles = [(one, self._with(self.given, one, option)) for one in among for option in one.options]
        yield from sorted((trial for _, trial in singles if self._works(trial)), key=lambda trial: trial.cost)
        # Of each dimension and way the best.
        freeing: dict[tuple[int, frozenset[str]], tuple[Dimension, Trial]] = {}
        for one, trial in sorted(singles, key=lambda single: single[1].cost):
            if trial.short_bytes < self.given.short_bytes:
                freeing.setdefault((id(one), _way_and_gpus(trial)), (one, trial))
        pairs = (
            self._try(trial.options | other.options)
            for (one, trial), (another, other) in itertools.combinations(freeing.values(), 2)
            if one is not another
        )
        yield from sorted((trial for trial in pairs if self._works(trial)), key=lambda trial: trial.cost)

    def _sets(self, among: Sequence[Dimension]) -> Iterator[Trial]:
        """Yield sets of changes; later ones are found without changes of earlier ones."""
        banned = [frozenset[str]()]  # ways of options
        for _ in range(_MOST_STARTS):
            if not banned:
                break
            without = banned.pop(0)
            if (trial := self._completed(among, without)) is not None:
                yield trial
                banned += [without | {self._way(option)} for option in sorted(trial.options)]

    def _works(self, trial: Trial) -> bool:
        return trial.fits and self._is_allowed(trial)

    def fastest(self) -> Trial | None:
        """Find the fastest values that fit, without changing what the run computes if that is possible."""
        for dimensions in itertools.islice(self._tiers(), 2):  # the machine stays
            starts = [self.given, self._smallest(dimensions), *self._of_tier(dimensions, [], _MOST_CHANGES, _way)]
            best = min((self._descend(start, dimensions) for start in starts), key=lambda trial: trial.cost)
            if self._works(best):
                return self._frugal(self._with_other_layouts(best, dimensions), dimensions)
        return None

    def _frugal(self, trial: Trial, dimensions: Sequence[Dimension]) -> Trial:
        """Choose micro-batches that need less memory, and go on where something faster fits then."""
        less = self._with_less(trial, dimensions)
        found = self._descend(self._best(less, dimensions), dimensions)
        return self._frugal(found, dimensions) if found.cost < trial.cost else less

    def _with_other_layouts(self, trial: Trial, dimensions: Sequence[Dimension]) -> Trial:
        """Try other layouts, each with other micro-batches, since a layout alone may only pay with these."""
        sizes = [one for one in dimensions if one.is_of_passes and not one.is_layout]
        for layouts in (one for one in dimensions if one.is_layout):
            found: list[Trial] = []
            for option in layouts.options:
                start = self._with(trial, layouts, option)
                for one in sizes[1:] if not start.fits else ():
                    start = self._with(start, one, "")
                found.append(self._best(start, [self._sizes(start, one) for one in sizes[:1]]))
            found.sort(key=lambda one: one.cost)
            works = [one for one in found if self._works(one)][:_MOST_LAYOUTS]
            short = [one for one in found if self._is_allowed(one) and not one.fits][:_MOST_LAYOUTS]
            trials = [trial, *(self._descend(one, dimensions) for one in (*works, *short))]
            trial = min(trials, key=lambda one: one.cost)
        return trial

    def _sizes(self, trial: Trial, dimension: Dimension) -> Dimension:
        """Return a dimension without the options that differ from a trial in more than numbers."""
        chosen = next((_without_numbers(option) for option in dimension.options if option in trial.options), None)

        def is_alike(option: str) -> bool:
            return "=" not in self._way(option) if chosen is None else _without_numbers(option) == chosen

        return replace(dimension, options=tuple(filter(is_alike, dimension.options)))

    def _with_less(self, trial: Trial, dimensions: Sequence[Dimension]) -> Trial:
        """Choose micro-batches that need less memory and are planned to be about as fast."""
        limit_s = _NO_GAIN * trial.step_s
        for one in (one for one in dimensions if one.is_of_passes):
            trials = [trial, *(self._with(trial, one, option) for option in ("", *one.options))]
            same = [it for it in trials if _way(it) <= _way(trial)]  # no other keys
            alike = [it for it in same if it.account.cfg.policy.backend == trial.account.cfg.policy.backend]
            trial = min((it for it in alike if self._works(it) and it.step_s <= limit_s), key=_pass_bytes)
        return trial

    def _completed(self, among: Sequence[Dimension], without: frozenset[str]) -> Trial | None:
        """Choose the values that help most until the run fits, then leave out those that it fits without.

        Where no single value helps any more, the smallest values of all are chosen first.

        Args:
            among: Where values are chosen.
            without: Values, as `_way` writes them, that are not chosen.
        """
        dimensions = [
            replace(one, options=tuple(option for option in one.options if self._way(option) not in without))
            for one in among
        ]
        trial = self.given
        while not self._works(trial):
            before = trial
            trial = self._best(trial, dimensions)
            if trial is before:
                trial = self._descend(self._smallest(dimensions), dimensions)
                break
        if not self._works(trial):
            return None
        for option in sorted(trial.options):
            smaller = self._try(trial.options - {option})
            if self._works(smaller):
                trial = smaller
        return trial

    def _way(self, option: str) -> str:
        """Write the overrides of an option that change the run, without their numbers."""
        return _without_numbers(" ".join(one for one in option.split() if not _has(self._account.cfg, one)))

    def _smallest(self, dimensions: Sequence[Dimension]) -> Trial:
        """Choose each dimension's value that leaves the fewest bytes short, whatever it costs."""
        trial = self.given
        for one in dimensions:
            trials = [trial, *(self._with(trial, one, option) for option in one.options)]
            trial = min(trials, key=lambda t: (not self._is_allowed(t), t.short_bytes))
        return trial

    def _descend(self, trial: Trial, dimensions: Sequence[Dimension]) -> Trial:
        """Change one dimension at a time while that helps."""
        for _ in range(_MOST_ROUNDS):
            before = trial
            for one in dimensions:
                trial = self._best(trial, [one])
            if trial is before:
                break
        return trial

    def _best(self, trial: Trial, dimensions: Sequence[Dimension]) -> Trial:
        """Return the best allowed trial that differs in one of these dimensions; `trial` if none is better."""
        trials = [self._with(trial, one, option) for one in dimensions for option in ("", *one.options)]
        better = (one for one in sorted(trials, key=lambda one: one.cost) if one.cost < trial.cost)
        return next((one for one in better if self._is_allowed(one)), trial)

    def _with(self, trial: Trial, dimension: Dimension, option: str) -> Trial:
        return self._try(trial.options.difference(dimension.options) | ({option} if option else set()))

    def _is_allowed(self, trial: Trial) -> bool:
        if trial.options not in self._allowed:
            self._allowed[trial.options] = self.judges.is_allowed(trial.account)
        return self._allowed[trial.options]

    def _try(self, options: frozenset[str]) -> Trial:
        if options not in self._tried:
            chosen = [one for one in self._dimensions if options.intersection(one.options)]
            by_key: dict[str, str] = {}  # of two values for a key the later dimension's counts
            for one in chosen:
                for override in next(option for option in one.options if option in options).split():
                    by_key[override.partition("=")[0]] = override
            overrides = tuple(override for override in by_key.values() if not _has(self._account.cfg, override))
            account = self._account.with_keys(" ".join(map(_as_value, overrides))) if overrides else self._account
            short_bytes = self.judges.short_bytes(account)
            step_s = 0.0 if short_bytes else self.judges.step_s(account)
            numbers, machine = any(one.changes_numbers for one in chosen), any(one.changes_machine for one in chosen)
            self._tried[options] = Trial(options, overrides, account, short_bytes, step_s, numbers, machine)
        return self._tried[options]


def _pass_bytes(trial: Trial) -> int:
    return sum(use.pass_bytes or 0 for use in trial.account.phases)


def _way(trial: Trial) -> frozenset[str]:
    """Return the overrides without their numbers: trials of one way differ in numbers only."""
    return frozenset(map(_without_numbers, trial.overrides))


def _way_and_gpus(trial: Trial) -> frozenset[str]:
    return _way(trial) | {f"{trial.account.cfg.cluster.gpus_per_node} GPUs"}


def _without_numbers(overrides: str) -> str:
    return re.sub(r"=[\d.]+(?= |$)", "", overrides)


def dimensions(account: Account, *, counts_passes: bool, varies: bool) -> Iterator[Dimension]:
    """Yield the values of all keys to try; those that the run has are left out.

    Args:
        account: The run.
        counts_passes: Phases include what passes need; otherwise keys that change these needs stay as they are.
        varies: Sequences are shorter than the longest, so that packing them may pay.
    """
    cfg, has_experts = account.cfg, account.shape.num_experts > 0
    on_megatron = isinstance(cfg.policy.backend, MegatronConfig)
    # The best micro-batch depends on what is recomputed, so both are chosen together.
    trained, *read = _batch_sizes(cfg, varies=varies)
    kept = _kept_by_megatron(has_experts=has_experts) if on_megatron else _kept_by_dtensor()
    both = tuple(f"{rows} {other}" for rows, other in itertools.product(trained, kept))
    chunks = tuple(f"policy.logprob_chunk_size={size}" for size in (1024, 4096, "null"))
    parallel = tuple(_parallel_sizes(cfg, has_experts=has_experts))
    found = [Dimension(options, is_of_passes=True) for options in (both, *read, chunks)]
    found.append(Dimension(parallel, is_layout=True, is_of_passes=True))
    found += _of_megatron() if on_megatron else _of_dtensor(cfg)
    if isinstance(cfg, RolloutMasterConfig):
        found += _of_engine(cfg)
    if isinstance(cfg, DistillationMasterConfig) and not on_megatron:
        found.append(Dimension(("teacher.stream_layers=true", "teacher.stream_layers=false")))
    if isinstance(cfg, GrpoMasterConfig):
        found.append(Dimension(("loss_fn.reference_policy_kl_penalty=0.0",), changes_numbers=True))
    found.append(Dimension(tuple(_more_gpus(cfg)), changes_machine=True))
    found.append(Dimension(tuple(_adapters(cfg)), changes_numbers=True, trains_less=True))
    for one in (one for one in found if counts_passes or not one.is_of_passes):
        options = tuple(option for option in one.options if not _has(cfg, option))
        if options:
            yield replace(one, options=options)


def _more_gpus(cfg: RunConfig) -> Iterator[str]:
    """Yield more GPUs of a host, with the engine and the model's layers divided over them or not."""
    for count in (count for count in _ROWS[1:4] if count > cfg.cluster.gpus_per_node):
        gpus = f"cluster.gpus_per_node={count}"
        divided = ["", f" {_divided(cfg, tensor=count, sequence=True)}"] if _may_divide_layers(cfg) else [""]
        engines = ["", f" {_engine_over(cfg, count)}"] if isinstance(cfg, RolloutMasterConfig) else [""]
        yield from (f"{gpus}{engine}{layers}" for engine in engines for layers in divided)


def _adapters(cfg: RunConfig) -> Iterator[str]:
    """Yield overrides that train adapters; in rollouts the frozen model may be on the host while the engine wakes."""
    if isinstance(cfg.policy.backend, MegatronConfig):
        yield f"{_MEGATRON}.peft.enabled=true"
        return
    adapters = f"{_DTENSOR}.lora_cfg.enabled=true"
    yield adapters
    if isinstance(cfg, RolloutMasterConfig) and cfg.policy.generation.colocated.enabled:
        yield f"{adapters} ++policy.residency_overrides.base=host"


def _has(cfg: RunConfig, overrides: str) -> bool:
    """Tell whether a run has all of these values already."""
    return all(_is_value_of(cfg, *_as_value(override).lstrip("+").split("=")) for override in overrides.split())


def _is_value_of(node: Any, path: str, text: str) -> bool:
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
    return (list(node) if isinstance(node, tuple) else node) == _parsed(text)


@cache
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def _as_value(override: str) -> str:
    """Turn the deletion of a section into an empty section."""
    return f"{override.removeprefix('~')}={{}}" if override.startswith("~") else override


def _batch_sizes(cfg: RunConfig, *, varies: bool) -> Iterator[tuple[str, ...]]:
    """Yield the sizes of micro-batches in training, then those in passes for logprobs.

    With `varies`, rows that are not packed may become so, which has other sizes for logprobs.
    """
    policy = cfg.policy
    by_tokens = [count * policy.max_total_sequence_length for count in _ROWS]
    packing = next((name for name in ("sequence_packing", "dynamic_batching") if getattr(policy, name).enabled), None)
    section = f"policy.{packing or 'sequence_packing'}"
    logprobs = tuple(f"{section}.logprob_mb_tokens={tokens}" for tokens in by_tokens)
    if packing is not None:
        yield tuple(f"{section}.train_mb_tokens={tokens}" for tokens in by_tokens)
        yield logprobs
        return
    packed = (f"{section}.enabled=true {section}.train_mb_tokens={tokens}" for tokens in by_tokens if varies)
    yield (*(f"policy.train_micro_batch_size={count}" for count in _ROWS), *packed)
    yield tuple(f"policy.logprob_batch_size={count}" for count in _ROWS)
    if varies:
        yield logprobs


def _kept_by_dtensor() -> tuple[str, ...]:
    """Return overrides, one for each choice: keep activations, recompute them, or also offload the layers' inputs."""
    recomputed, offloaded = f"{_DTENSOR}.activation_checkpointing", f"{_DTENSOR}.activation_offload"
    return (
        f"{recomputed}=false {offloaded}=false",
        f"{recomputed}=true {offloaded}=false",
        f"{recomputed}=true {offloaded}=true",
    )


def _kept_by_megatron(*, has_experts: bool) -> Iterator[str]:
    """Yield overrides, one for each choice: modules that are recomputed, with modules that are offloaded."""
    recomputed, offloaded = f"{_MEGATRON}.activation_checkpointing", f"{_MEGATRON}.fine_grained_activation_offloading"
    # What measurements found to pay (docs/measurements/activations.md).
    offloads = ("moe_act",) if has_experts else ("qkv_linear,core_attn,attn_proj",)
    for modules in (None, *(("moe_act", "moe") if has_experts else ("mlp",)), "all"):
        again = f"{recomputed}=false"
        if modules == "all":
            again = f"{recomputed}=true {_MEGATRON}.recompute_granularity=full {_MEGATRON}.recompute_modules=null"
        elif modules is not None:
            selective = f"{_MEGATRON}.recompute_granularity=selective {_MEGATRON}.recompute_modules=[{modules}]"
            again = f"{recomputed}=true {selective}"
        yield f"{again} {offloaded}=false"
        for names in () if modules in ("all", "moe", *offloads) else offloads:
            yield f"{again} {offloaded}=true {_MEGATRON}.offload_modules=[{names}]"


def _parallel_sizes(cfg: RunConfig, *, has_experts: bool) -> Iterator[str]:
    """Yield ways to divide the model and its rows over the workers."""
    world_size, per_host = cfg.cluster.world_size, cfg.cluster.gpus_per_node
    on_megatron = isinstance(cfg.policy.backend, MegatronConfig)
    sizes = [size for size in _ROWS if world_size % size == 0]
    tensors = sizes if _may_divide_layers(cfg) else [1]
    pipelines = sizes if on_megatron else [1]
    for tensor, context, pipeline in itertools.product(tensors, sizes, pipelines):
        if world_size % (tensor * context * pipeline) or tensor * context > per_host:
            continue
        experts = [size for size in sizes if has_experts and world_size % (size * pipeline) == 0] or [1]
        for expert in experts:
            if tensor == 1 or not on_megatron:
                yield _divided(cfg, tensor, context, pipeline, expert)
            if tensor > 1:  # with Megatron's sums this takes as long
                yield _divided(cfg, tensor, context, pipeline, expert, sequence=True)


def _may_divide_layers(cfg: RunConfig) -> bool:
    """Tell whether layers may be divided over workers: those with adapters may not."""
    backend = cfg.policy.backend
    return not (backend.peft if isinstance(backend, MegatronConfig) else cfg.policy.dtensor_cfg.lora_cfg).enabled


def _divided(
    cfg: RunConfig, tensor: int, context: int = 1, pipeline: int = 1, expert: int = 1, *, sequence: bool = False
) -> str:
    """Write overrides with these parallel sizes; `sequence` also divides norms and residuals by rows."""
    # Of each row a context-parallel rank takes an early and a late piece.
    multiple = math.lcm(cfg.policy.make_sequence_length_divisible_by, tensor * (2 * context if context > 1 else 1))
    padded = f"policy.make_sequence_length_divisible_by={multiple}"
    rows = f"sequence_parallel={str(sequence).lower()}"
    if isinstance(cfg.policy.backend, MegatronConfig):
        keys = [
            f"tensor_model_parallel_size={tensor}",
            f"context_parallel_size={context}",
            f"pipeline_model_parallel_size={pipeline}",
            f"expert_model_parallel_size={expert}",
            rows,
        ]
        return " ".join([*(f"{_MEGATRON}.{key}" for key in keys), padded])
    keys = [
        f"tensor_parallel_size={tensor}",
        f"context_parallel_size={context}",
        f"expert_parallel_size={expert}",
        rows,
    ]
    parallel = cfg.policy.dtensor_cfg.model_parallel
    if tensor * context > 1:
        keys.append("torch_compile=false")  # layers that are divided cannot be compiled
    elif parallel.tensor * parallel.context > 1:
        keys.append("torch_compile=true")
    return " ".join([*(f"{_DTENSOR}.{key}" for key in keys), padded])


def _offloaded_states(section: str) -> tuple[str, ...]:
    """Return overrides, one for each choice: stream no optimizer states, all of them, or a share of them."""
    states, share = f"{section}.offload_optimizer_states", f"{section}.offload_optimizer_states_fraction"
    size = f"{section}.offload_optimizer_states_chunk_mib"
    return (
        f"{states}=false {size}=null",
        *(f"{states}=true {size}=1024.0 {share}={part}" for part in ("1.0", "0.75", "0.5", "0.25")),
    )


def _of_dtensor(cfg: RunConfig) -> Iterator[Dimension]:
    recomputed = f"{_DTENSOR}.activation_checkpointing"
    whole = f"{_DTENSOR}.cpu_offload"
    kept_nowhere = " ~policy.residency_overrides" if isinstance(cfg, RolloutMasterConfig) else ""
    yield Dimension(
        (
            *(f"{one} {whole}=false" for one in _offloaded_states(_DTENSOR)),
            # All state passes through the GPU; layers are recomputed.
            f"{_offloaded_states(_DTENSOR)[0]} {whole}=true {recomputed}=true{kept_nowhere}",
        )
    )
    if cfg.policy.optimizer is not None and cfg.policy.optimizer.name == "torch.optim.AdamW":
        yield Dimension(("policy.optimizer.name=nemo_offload_rl.optim.AdamW",), changes_numbers=True)


def _of_megatron() -> Iterator[Dimension]:
    cfg, optimizer = _MEGATRON, f"{_MEGATRON}.optimizer"
    # States that stream are updated on the GPU.
    kept, *streamed = _offloaded_states(optimizer)
    yield Dimension((kept, *(f"{one} {optimizer}.optimizer_cpu_offload=false" for one in streamed)))
    yield Dimension((f"{cfg}.distributed_data_parallel_config.grad_reduce_in_fp32=false",), changes_numbers=True)
    yield Dimension(
        (f"{optimizer}.exp_avg_dtype=bfloat16 {optimizer}.exp_avg_sq_dtype=bfloat16",), changes_numbers=True
    )


def _engine_over(cfg: RolloutMasterConfig, num_devices: int) -> str:
    """Return overrides for engines of so many devices, which share out experts if they do so now."""
    sizes = [f"{_VLLM}.tensor_parallel_size={num_devices}"]
    if cfg.policy.generation.vllm_cfg.expert_parallel_size > 1:
        sizes.append(f"{_VLLM}.expert_parallel_size={num_devices}")
    return " ".join(sizes)


def _of_engine(cfg: RolloutMasterConfig) -> Iterator[Dimension]:
    if not cfg.policy.generation.colocated.enabled:
        return
    if cfg.policy.generation.vllm_cfg.kv_cache_memory_gib is None:
        yield Dimension(tuple(f"{_VLLM}.gpu_memory_utilization={share:g}" for share in _SHARES))
    sizes = [size for size in _ROWS if cfg.cluster.gpus_per_node % size == 0]
    yield Dimension(tuple(_engine_over(cfg, size) for size in sizes))
    has_base = cfg.policy.dtensor_cfg.enabled and cfg.policy.dtensor_cfg.lora_cfg.enabled
    for group in ("params", *(["base"] if has_base else []), "optimizer"):
        yield Dimension(tuple(f"++policy.residency_overrides.{group}={place}" for place in ("device", "host")))
