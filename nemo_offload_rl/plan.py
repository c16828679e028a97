"""Plans a run before it starts, on any machine: `python -m nemo_offload_rl.plan --help`.

The plan and the checks are those of a real start, for GPUs and main memory of given sizes. It needs neither a GPU nor
Ray nor the model's weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn

from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.utils.cli import ending_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nemo_offload_rl.config.rules.base import RuleSet
    from nemo_offload_rl.keys.master import RunConfig
    from nemo_offload_rl.memory.account import Account, PhaseUse
    from nemo_offload_rl.memory.gpus import Gpu
    from nemo_offload_rl.memory.search import Search, Trial
    from nemo_offload_rl.memory.seconds import StageSeconds, Work
    from nemo_offload_rl.memory.stages import Stage
    from nemo_offload_rl.memory.transfers import Copies

_GIB = 2**30
_FEWEST_PARAMETERS, _MOST_PARAMETERS = 10_000, 10**14  # others are mistakes
_NO_LIMIT_BYTES = 1 << 60  # main memory that nobody named
_MOST_GIB = 2**20  # of a host; larger numbers are bytes


@dataclass(frozen=True)
class Target:
    """The machine of a plan.

    Attributes:
        gpu: Type of its GPUs.
        host_bytes: Main memory that a run may take; None if it is not known, so that it is not compared.
        num_parameters: Parameters of the policy's model; None reads the folder `policy.model_name`.
        length: Mean tokens of a sequence, for seconds; None for the longest that the configuration allows.
    """

    gpu: Gpu
    host_bytes: int | None = None
    num_parameters: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class Plan:
    """Memory that a run takes of a machine, and the seconds of its steps.

    Attributes:
        account: Account of the run on the machine.
        target: The machine.
        copies: Bytes of one GPU that cross the link to the host in each stage of a step.
        work: Sequences of a step.
        seconds: Seconds of each stage of a step; None if rates of the GPU or layers of the model are unknown.
        streamed: Rows of the plan whose groups are on the GPU part by part only.
        problems: Reasons why the run does not fit, with changes to make; empty if it fits.
    """

    account: Account
    target: Target
    copies: Mapping[Stage, Copies]
    work: Work
    seconds: Mapping[Stage, StageSeconds] | None
    streamed: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def phases(self) -> tuple[PhaseUse, ...]:
        """Use of one GPU in each phase."""
        return self.account.phases

    @property
    def owners(self) -> Mapping[str, int]:
        """Main memory of all processes of a host, in bytes by owner."""
        return self.account.host_owners

    @property
    def step_s(self) -> float | None:
        """Seconds of a step after the first; None if they are unknown."""
        from nemo_offload_rl.memory.seconds import total_seconds

        return None if self.seconds is None else total_seconds(self.account, self.seconds)

    @property
    def counts_passes(self) -> bool:
        """Tell whether the phases include what passes need."""
        return all(use.pass_bytes is not None for use in self.phases)

    @property
    def omits_teacher(self) -> bool:
        """Tell whether the run has a teacher whose size is unknown."""
        return hasattr(self.account.cfg, "teacher") and self.account.teacher_bytes is None

    def render(self) -> str:
        """Render the plan, memory, copies, seconds and the verdict as text."""
        from nemo_offload_rl.memory.host_plan import render_host_plan

        plan, workers = self.account.plan, self.account.cfg.cluster.workers_per_node
        assert self.account.num_parameters
        lines = [
            f"{self.account.num_parameters / 1e9:.2f} B parameters; residency plan of each policy worker:",
            plan.plan.render(plan.sizes),
            "",
            *self._phase_lines(),
            "",
            *self._stage_lines(),
            "",
            render_host_plan(self.account.need, "cuda", workers)
            + (f", of {self.target.host_bytes / _GIB:.2f}" if self.target.host_bytes is not None else ""),
        ]
        if self.target.host_bytes is None:
            lines.append("main memory is not compared: give --host-gib")
        lines += [f"does not fit: {problem}" for problem in self.problems]
        return "\n".join([*lines, *([] if self.problems else [self._verdict()])])

    def _verdict(self) -> str:
        fullest = max(self.phases, key=lambda use: use.total_bytes)
        text = f"fits: {fullest.total_bytes / _GIB:.1f} of {fullest.gpu_bytes / _GIB:.1f} GiB in {fullest.phase.name}"
        if self.counts_passes:
            return text
        return f"{text}, without activations, for which {self._least_left() / _GIB:.1f} GiB are left in training"

    def _least_left(self) -> int:
        from nemo_offload_rl.residency import Phase

        return min(use.left_bytes for use in self.phases if use.phase in (Phase.TRAINING, Phase.OPTIM_STEP))

    def gib_by_owner(self) -> dict[str, dict[str, float]]:
        """GiB of a GPU at the peak of each phase, by owner; owners without bytes are left out."""
        table: dict[str, dict[str, float]] = {}
        for use in self.phases:
            sizes = {**use.state, "passes": use.pass_bytes or 0}
            sizes |= {"engine": use.engine_bytes, "contexts": use.other_bytes}
            table[use.phase.name] = {name: size / _GIB for name, size in sizes.items()}
        used = {name for sizes in table.values() for name, size in sizes.items() if size}
        return {phase: {name: size for name, size in sizes.items() if name in used} for phase, sizes in table.items()}

    def _phase_lines(self) -> list[str]:
        table = self.gib_by_owner()
        owners = list(next(iter(table.values())))
        titles = [
            "GPU, GiB of " + format(self.target.gpu.memory_bytes / _GIB, ".1f"),
            *owners,
            "sum",
            "left",
            "early",
            "leaving",
        ]
        rows = [titles]
        for use in self.phases:
            sizes = [*table[use.phase.name].values()]
            sizes += [size / _GIB for size in (use.total_bytes, use.left_bytes, use.early_bytes, use.leaving_bytes)]
            rows.append([use.phase.name, *(format(size, ".1f") for size in sizes)])
        note = "left: " + ("free" if self.counts_passes else "for activations, which are not counted")
        lines = [
            *_aligned(rows),
            f"{note}; early, leaving: state of the phase after, or before, which is there if it has room",
        ]
        if self.omits_teacher:
            lines.append("the teacher is not counted: teacher.model_name is no local folder with a model's config.json")
        if self.streamed:
            lines.append(
                f"of {' and '.join(self.streamed)} the embedding's part counts, if the model's config.json is there; "
                "others come where there is room"
            )
        return lines

    def _stage_lines(self) -> list[str]:
        rows = [["a step, of one GPU", "GB in", "GB out", *(["seconds", "exposed"] if self.seconds else [])]]
        for stage, copies in self.copies.items():
            cells = [format(size / 1e9, ".1f") for size in (copies.in_bytes, copies.out_bytes)]
            if self.seconds is not None:
                cells += [format(self.seconds[stage].total_s, ".1f"), format(self.seconds[stage].exposed_s, ".1f")]
            rows.append([str(stage), *cells])
        lines = _aligned(rows)
        if self.step_s is None:
            return [*lines, f"seconds are not known: {self.why_no_seconds()}"]
        about = f"{self.work.num_sequences} sequences of {self.work.length} tokens"
        lines.append(f"{self.step_s:.1f} s a step of {about}; --tokens gives another mean length")
        return lines

    def why_no_seconds(self) -> str:
        """Say what is missing to estimate seconds."""
        if self.target.gpu.rates is None:
            return "they need rates of the GPU, which --gpu has for known ones and --calibrate measures"
        return "policy.model_name is no local folder with a model's config.json"

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain dictionaries: bytes in GiB, GB over the link, seconds."""
        return {
            "gpu": self.target.gpu.name,
            "gpu_gib": self.target.gpu.memory_bytes / _GIB,
            "num_parameters": self.account.num_parameters,
            "fits": not self.problems,
            "problems": list(self.problems),
            "counts_passes": self.counts_passes,
            "phases": {
                use.phase.name: {
                    "gib": self.gib_by_owner()[use.phase.name],
                    "left_gib": use.left_bytes / _GIB,
                    "early_gib": use.early_bytes / _GIB,
                    "leaving_gib": use.leaving_bytes / _GIB,
                }
                for use in self.phases
            },
            "usable_host_gib": None if self.target.host_bytes is None else self.target.host_bytes / _GIB,
            "host_gib": {owner: size / _GIB for owner, size in self.owners.items()},
            "stages": {
                str(stage): {
                    "gb_in": copies.in_bytes / 1e9,
                    "gb_out": copies.out_bytes / 1e9,
                    **({} if self.seconds is None else _seconds_json(self.seconds[stage])),
                }
                for stage, copies in self.copies.items()
            },
            "step_s": self.step_s,
            "sequences": self.work.num_sequences,
            "tokens_of_a_sequence": self.work.length,
        }


def _seconds_json(seconds: StageSeconds) -> dict[str, float]:
    return {"seconds": seconds.total_s, "exposed_s": seconds.exposed_s}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def load_account(path: str | Path, overrides: Sequence[str], target: Target) -> tuple[Account, RuleSet[Any]]:
    """Load a run, check what holds on any machine, and count its memory on the machine.

    Args:
        path: The configuration of a run that trains.
        overrides: Hydra overrides.
        target: The machine.

    Returns:
        The account, and the rules of such runs.

    Raises:
        ConfigError: The configuration is wrong on any machine, or the model's size is unknown.
    """
    from nemo_offload_rl.config.rules import broken
    from nemo_offload_rl.config.validate import join_problems
    from nemo_offload_rl.runs.loading import load_for_planning

    account_of = _accountant(target)
    cfg, rules = load_for_planning(path, overrides, account_of)
    if not cfg.cluster.gpus_per_node:
        raise ConfigError("cluster.gpus_per_node is 0, and the plan is for GPUs; set it to their number on a host")
    if wrong := broken(rules.rules, cfg):
        raise ConfigError(join_problems(wrong))
    account = account_of(cfg)
    if account.num_parameters is None:
        raise ConfigError(_size_unknown(cfg.policy.model_name))
    return account, rules


def _accountant(target: Target) -> Callable[[RunConfig], Account]:
    from nemo_offload_rl.memory.account import Account
    from nemo_offload_rl.memory.machine import Machine

    machine = Machine(target.gpu.memory_bytes, target.host_bytes or _NO_LIMIT_BYTES, rates=target.gpu.rates)
    return lambda cfg: Account(cfg, machine, target.num_parameters, without_weights=True)


def _size_unknown(model_name: str) -> str:
    """Say why the number of a model's parameters is not known, and what to change."""
    from nemo_offload_rl.backends.hf.export import load_config
    from nemo_offload_rl.backends.hf.model_folder import is_hub_name, read_model_config

    if is_hub_name(model_name):
        return (
            f"policy.model_name={model_name} is no folder of this machine; give one with a config.json, or --parameters"
        )
    try:
        read_model_config(model_name)
        load_config(model_name, {})
    except UserError as error:
        return f"{str(error).rstrip('.')}; or give --parameters"
    return f"transformers cannot build the model of {model_name}/config.json; correct that file, or give --parameters"


def plan_run(path: str | Path, overrides: Sequence[str], target: Target) -> tuple[Plan, RuleSet[Any]]:
    """Plan a run on a machine; arguments, errors and the rules as in `load_account`."""
    account, rules = load_account(path, overrides, target)
    return plan_of(account, target, rules), rules


def plan_of(account: Account, target: Target, rules: RuleSet[Any]) -> Plan:
    """Plan the run of an account."""
    from nemo_offload_rl.config.rules import broken
    from nemo_offload_rl.memory.seconds import step_seconds, work_of
    from nemo_offload_rl.memory.transfers import copies_of_step
    from nemo_offload_rl.residency import TEACHER_LAYER

    rates, work, sizes = target.gpu.rates, work_of(account, target.length), account.plan.sizes
    return Plan(
        account=account,
        target=target,
        copies=copies_of_step(account),
        work=work,
        seconds=None if rates is None else step_seconds(account, rates, work),
        streamed=tuple(sorted(row for row in account.rows_in_parts - {TEACHER_LAYER} if sizes[row])),
        problems=tuple(broken(rules.memory, account)),
    )


def search_of(plan: Plan, rules: RuleSet[Any]) -> Search:
    """Search for other values of the keys of a planned run."""
    from nemo_offload_rl.config.rules import broken
    from nemo_offload_rl.memory.account import TOLERANCE
    from nemo_offload_rl.memory.search import Judges, Search, dimensions
    from nemo_offload_rl.memory.seconds import step_seconds, total_seconds, work_of

    # Passes may need so much more than is estimated.
    margin_bytes = int(TOLERANCE * plan.target.gpu.memory_bytes) if plan.counts_passes else 0

    def short_bytes(account: Account) -> int:
        if account is plan.account and not plan.problems:
            return 0  # the margin is for changes
        # Rules write messages, with advice that is tried; they are asked only where no bytes are short.
        return account.short_bytes(margin_bytes) or len(broken(rules.memory, account))

    def step_s(account: Account) -> float:
        seconds = None if rates is None else step_seconds(account, rates, work_of(account, plan.target.length))
        return 0.0 if seconds is None else total_seconds(account, seconds)

    rates = plan.target.gpu.rates
    judges = Judges(lambda account: not broken(rules.rules, account.cfg), short_bytes, step_s)
    varies = plan.work.length < plan.account.cfg.policy.max_total_sequence_length
    return Search(plan.account, judges, dimensions(plan.account, counts_passes=plan.counts_passes, varies=varies))


def render_changes(plan: Plan, changes: Sequence[Trial]) -> str:
    """Render who is at fault if a run does not fit, and changes that make it fit, as text."""
    short = min(plan.phases, key=lambda use: use.left_bytes)
    if short.left_bytes < 0:
        owner, gib = max(plan.gib_by_owner()[short.phase.name].items(), key=lambda item: item[1])
        lines = [
            f"in {short.phase.name} a GPU lacks {-short.left_bytes / _GIB:.1f} GiB; most is {owner}: {gib:.1f} GiB"
        ]
    else:
        owner = max(plan.owners, key=lambda name: plan.owners[name])
        lines = [f"of main memory, most is {owner}: {plan.owners[owner] / _GIB:.1f} GiB"]
    if not changes:
        return "\n".join([*lines, "no other values of the keys were found with which it fits"])
    lines.append("changes that make it fit:")
    for trial in changes:
        gib = freed_bytes(plan, trial) / _GIB
        cost = f", {trial.step_s - plan.step_s:+.1f} s a step" if plan.step_s else ""
        note = ", with other numbers" if trial.changes_numbers else ""
        lines.append(f"  {' '.join(trial.overrides)} (frees {gib:.1f} GiB{cost}{note})")
    return "\n".join(lines)


def freed_bytes(plan: Plan, trial: Trial) -> int:
    """Bytes that changes free: of a GPU in its fullest phase, or of main memory if GPUs have room."""
    least = min(use.left_bytes for use in plan.phases)
    if least < 0:
        return min(use.left_bytes for use in trial.account.phases) - least
    return sum(plan.owners.values()) - sum(trial.account.host_owners.values())


def as_tried(plan: Plan, trial: Trial, path: Path, overrides: Sequence[str]) -> Trial:
    """Add overrides for keys that copy a changed key in the file, such as `logprob_batch_size`, but kept their value.

    Args:
        plan: The run.
        trial: Changes of it.
        path: The configuration.
        overrides: Overrides of the run.
    """
    from nemo_offload_rl.runs.loading import load_for_planning

    loaded, _ = load_for_planning(path, [*overrides, *trial.overrides], _accountant(plan.target))
    copied = [f"{key}={json.dumps(value)}" for key, value in _different(loaded, trial.account.cfg)]
    return replace(trial, overrides=(*trial.overrides, *copied))


def _different(loaded: Any, tried: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and tried values that differ, of numbers, booleans and null in sections that are enabled."""
    if is_dataclass(tried) and type(loaded) is type(tried):
        for field in fields(tried) if getattr(tried, "enabled", True) else ():
            names = getattr(loaded, field.name), getattr(tried, field.name)
            yield from _different(*names, f"{path}.{field.name}" if path else field.name)
    elif loaded != tried and isinstance(tried, (bool, int, float, NoneType)):
        yield path, tried


def _key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def render_fastest(plan: Plan, fastest: Trial | None, path: Path, overrides: Sequence[str]) -> str:
    """Render the fastest values that fit as the command line of the run."""
    if fastest is None:
        return "no values of the keys were found with which it fits"
    before = f" (as configured: {plan.step_s:.1f} s)" if plan.step_s else ""
    script = f"examples/run_{plan.account.cfg.algorithm[0]}.py"
    changed = {_key_of(override) for override in fastest.overrides}
    kept = [override for override in overrides if _key_of(override) not in changed]
    command = shlex.join(["python", script, "--config", str(path), *kept, *fastest.overrides])
    return f"the fastest that fits takes {fastest.step_s:.1f} s a step{before}:\n{command}"


def usable_host_bytes(host_gib: float) -> int:
    """Bytes of a host of this size that a run may take: a Ray started by the run leaves some free."""
    from nemo_offload_rl.memory.limits import share_in_use

    return int(share_in_use(int(host_gib * _GIB)) * host_gib * _GIB)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number; give one above 0") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0; give one")
    return value


def _gib(text: str) -> float:
    value = _positive(text)
    if value > _MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text} GiB is more than any machine has; give GiB, not bytes")
    return value


def _count(text: str) -> int:
    value = _positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is no whole number; give one above 0")
    return int(value)


def _parameters(text: str) -> int:
    """Parse a number of parameters; `14.8e9` and `14.8B` are the same."""
    billions = text.upper().endswith("B")
    count = _positive(text[:-1] if billions else text) * (1e9 if billions else 1)
    if count < _FEWEST_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{text} is {count:.0f} parameters; for billions, write {text}B or {text}e9")
    if count > _MOST_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{text} is more than any model has; for 14.8 billions, write 14.8B or 14.8e9")
    return int(count)


def _gpu(name: str | None, gib: float | None) -> Gpu:
    """Find the GPU of the options, or the one of this machine."""
    from nemo_offload_rl.memory.gpus import KNOWN, Gpu, find_gpu, gpu_here

    if gib is not None:
        if name is not None:
            raise ConfigError("--gpu and --gpu-gib are both given; leave one of them out")
        return Gpu(f"a GPU of {gib:g} GiB", int(gib * _GIB))
    if (gpu := find_gpu(name) if name is not None else gpu_here()) is None:
        raise ConfigError(f"this machine has no GPU to plan for; give --gpu ({', '.join(KNOWN)}) or --gpu-gib")
    return gpu


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message if ";" in message else f"{message}; --help lists the options")


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m nemo_offload_rl.plan",
        description="Print what a run takes of a GPU in each phase and of main memory, what crosses the link between "
        "them, how long a step takes, and whether the run fits. Needs neither a GPU nor Ray nor the model's weights.",
    )
    parser.add_argument("--config", type=Path, metavar="PATH", help="YAML file of a run that trains")
    parser.add_argument("--gpu", metavar="NAME", help="type of the GPUs, such as H200; without it, this machine's")
    parser.add_argument("--gpu-gib", type=_gib, metavar="GIB", help="memory of a GPU of another type")
    parser.add_argument("--gpus", type=_count, metavar="N", help="GPUs of a host; sets cluster.gpus_per_node")
    parser.add_argument("--host-gib", type=_gib, metavar="GIB", help="main memory of a host; not compared without")
    parser.add_argument(
        "--parameters",
        type=_parameters,
        metavar="N",
        help="of the model, such as 14.8B; without it, the folder policy.model_name is read, which needs no weights",
    )
    parser.add_argument(
        "--tokens", type=_count, metavar="N", help="mean tokens of a sequence, for seconds; otherwise the longest"
    )
    parser.add_argument(
        "--fit", action="store_true", help="search for the fastest values of the keys that fit; print the command line"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts, too")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure the rates of this machine's GPU in 20 seconds and write them to a .json file for --gpu; no plan",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as for the launch scripts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and print the plan; the status is 2 if the run does not fit."""
    parser = _arguments()
    given = parser.parse_intermixed_args(argv)
    if given.calibrate is not None:
        return _calibrate(given.calibrate)
    if given.config is None:
        parser.error("the following arguments are required: --config")
    _check_writable(given.html)
    if wrong := next((text for text in given.overrides if "=" not in text and not text.startswith("~")), None):
        raise ConfigError(f"{wrong} is no override; write KEY=VALUE, and for a file of JSON: --json > {wrong}")
    overrides = [*given.overrides, *([] if given.gpus is None else [f"cluster.gpus_per_node={given.gpus}"])]
    gpu = _gpu(given.gpu, given.gpu_gib)
    host_bytes = None if given.host_gib is None else usable_host_bytes(given.host_gib)
    target = Target(gpu, host_bytes, given.parameters, given.tokens)
    plan, rules = plan_run(given.config, overrides, target)
    if given.fit and plan.step_s is None:
        raise ConfigError(f"--fit compares seconds, which are not known: {plan.why_no_seconds()}")
    search = search_of(plan, rules) if given.fit or plan.problems else None
    changes = search.cheapest() if search is not None and plan.problems else []
    changes = [as_tried(plan, trial, given.config, overrides) for trial in changes]
    fastest = search.fastest() if search is not None and given.fit else None
    if fastest is not None:
        fastest = as_tried(plan, fastest, given.config, overrides)
    text = _report(plan, changes, fastest, given.config, overrides, searches=given.fit)
    told: dict[str, Any] = {**plan.to_json(), "changes": [_trial_json(plan, trial) for trial in changes]}
    if given.fit:
        told["fastest"] = None if fastest is None else _trial_json(plan, fastest)
    sys.stdout.write(f"{json.dumps(told, indent=1) if given.json else text}\n")
    if given.html is not None:
        from nemo_offload_rl.report.plan import plan_page

        _write(given.html, plan_page(f"Plan of {given.config.name}", str(given.config), told, text))
    return 2 if plan.problems and fastest is None else 0


def _report(
    plan: Plan, changes: Sequence[Trial], fastest: Trial | None, path: Path, overrides: Sequence[str], *, searches: bool
) -> str:
    """Render the plan, changes that make it fit, and the fastest values if they were searched for."""
    parts = [plan.render()]
    parts += [render_changes(plan, changes)] if plan.problems else []
    if searches and (fastest is not None or changes):  # otherwise it is said already that nothing fits
        parts.append(render_fastest(plan, fastest, path, overrides))
    return "\n".join(parts)


def _calibrate(path: Path) -> int:
    """Measure the rates of this machine and write them to a file."""
    if path.suffix != ".json":
        raise ConfigError(f"--calibrate={path}: --gpu takes names that end with .json; give such a name")
    _check_writable(path)
    import torch

    from nemo_offload_rl.memory.calibrate import calibrate

    if not torch.cuda.is_available():
        raise ConfigError(
            "--calibrate measures the GPU of this machine, and torch finds none; run it where there is one"
        )
    gpu = calibrate(torch.device("cuda"))
    told = asdict(gpu)
    _write(path, f"{json.dumps(told, indent=1)}\n")
    sys.stdout.write(f"{gpu.name}: {json.dumps(told['rates'])}\nwritten to {path}; use it as --gpu {path}\n")
    return 0


def _check_writable(path: Path | None) -> None:
    """Refuse the name of a file that cannot be written, before the work whose result it gets."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{path} is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(f"{path} cannot be written: {wrong}; give the name of a file in a folder that exists")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another name of a file") from error


def _trial_json(plan: Plan, trial: Trial) -> dict[str, Any]:
    return {
        "overrides": list(trial.overrides),
        "step_s": trial.step_s or None,
        "frees_gib": freed_bytes(plan, trial) / _GIB,
    }


if __name__ == "__main__":
    gc.disable()  # a tenth of the seconds, most of which are imports of torch and transformers
    with ending_process():
        sys.exit(main())
