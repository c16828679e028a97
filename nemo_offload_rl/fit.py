"""Estimates on any machine whether a run fits another one: `python -m nemo_offload_rl.fit --help`.

The plan and the checks are those of a real start, for GPUs and main memory of given sizes. Activations and the memory
to build a model are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.cli import ending_process

if TYPE_CHECKING:
    from nemo_offload_rl.memory.account import Account, PhaseUse

_GIB = 2**30
_FEWEST_PARAMETERS = 10_000  # smaller models are not worth a plan


@dataclass(frozen=True)
class Fit:
    """Memory that a run takes of a machine.

    Attributes:
        account: Account of the run on the machine.
        phases: Use of one GPU in each phase.
        owners: Main memory by owner, in bytes, of all processes of a host.
        streamed: Rows of the plan whose groups are on the GPU part by part only.
        omits_teacher: A teacher's size is unknown.
        host_line: Host memory, as text.
        problems: Reasons why the run does not fit, with changes to make; empty if it fits.
    """

    account: Account
    phases: tuple[PhaseUse, ...]
    owners: dict[str, int]
    streamed: tuple[str, ...]
    omits_teacher: bool
    host_line: str
    problems: tuple[str, ...]

    def render(self) -> str:
        """Render the plan, the memory and the problems as text."""
        plan, machine = self.account.plan, self.account.machine
        assert self.account.num_parameters and machine.gpu_bytes and machine.planned_host_bytes
        lines = [
            f"{self.account.num_parameters / 1e9:.2f} B parameters; residency plan of each policy worker:",
            plan.plan.render(plan.sizes),
            f"{'GPU, GiB of ' + format(machine.gpu_bytes / _GIB, '.1f'):22s}"
            + "".join(f"{title:>10s}" for title in ("policy", "engine", "other", "left", "early")),
        ]
        for use in self.phases:
            sizes = (use.state_bytes, use.engine_bytes, use.other_bytes, use.left_bytes, use.early_bytes)
            lines.append(f"{use.phase.name:22s}" + "".join(f"{size / _GIB:10.1f}" for size in sizes))
        lines.append("left: for passes; early: state of the phase that follows, which comes where passes leave room")
        if self.omits_teacher:
            lines.append("the teacher is not counted: teacher.model_name is no local folder with a model's config.json")
        if self.streamed:
            lines.append(
                f"of {' and '.join(self.streamed)} the embedding's part counts, if the model's config.json is there; "
                "others come where there is room"
            )
        lines.append(f"{self.host_line}, of {machine.planned_host_bytes / _GIB:.2f}")
        return "\n".join([*lines, *(f"does not fit: {problem}" for problem in self.problems)])


def plan_fit(
    path: str | Path, overrides: Sequence[str], gpu_gib: float, host_gib: float, num_parameters: int | None = None
) -> Fit:
    """Count what a run takes of GPUs of `gpu_gib` on a host of `host_gib`.

    Args:
        path: The configuration of a run that trains.
        overrides: Hydra overrides.
        gpu_gib: Memory of a GPU, as the CUDA driver reports it.
        host_gib: Main memory of the host; a Ray started by the run leaves 3 GiB of it free.
        num_parameters: Parameters of the model; None reads the folder `policy.model_name`.

    Raises:
        ConfigError: The configuration is wrong on any machine, or the model's size is unknown.
    """
    from nemo_offload_rl.config.rules import broken
    from nemo_offload_rl.config.validate import join_problems
    from nemo_offload_rl.memory.account import Account
    from nemo_offload_rl.memory.host_plan import host_bytes_by_owner, render_host_plan
    from nemo_offload_rl.memory.limits import share_in_use
    from nemo_offload_rl.memory.machine import Machine
    from nemo_offload_rl.runs.loading import load_for_planning

    cfg, rules = load_for_planning(path, overrides)
    if not cfg.cluster.gpus_per_node:
        raise ConfigError("cluster.gpus_per_node is 0, and the plan is for GPUs; set it to their number on a host")
    host_bytes = int(share_in_use(int(host_gib * _GIB)) * host_gib * _GIB)
    account = Account(cfg, Machine(int(gpu_gib * _GIB), host_bytes), num_parameters, without_weights=True)
    if account.num_parameters is None:
        raise ConfigError(
            f"policy.model_name={cfg.policy.model_name} is no local folder with a model's config.json that "
            "transformers knows; give --parameters"
        )
    if wrong := broken(rules.rules, cfg):
        raise ConfigError(join_problems(wrong))
    sizes, workers = account.plan.sizes, cfg.cluster.workers_per_node
    return Fit(
        account=account,
        phases=account.phases,
        owners=host_bytes_by_owner(account.need, "cuda", workers),
        streamed=tuple(sorted(row for row in account.rows_in_parts if sizes[row])),
        omits_teacher=hasattr(cfg, "teacher") and account.teacher_bytes is None,
        host_line=render_host_plan(account.need, "cuda", workers),
        problems=tuple(broken(rules.memory, account)),
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _parameters(text: str) -> int:
    """Parse a number of parameters; `14.8e9` and `14.8B` are the same."""
    billions = text.upper().endswith("B")
    count = int(_positive(text[:-1] if billions else text) * (1e9 if billions else 1))
    if count < _FEWEST_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{text} is {count} parameters; for billions, write {text}B or {text}e9")
    return count


def main() -> int:
    """Read the command line and print the plan."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_offload_rl.fit",
        description="Print the residency plan of a run, what it takes of a GPU in each phase and of main memory, and "
        "whether that fits. Needs neither a GPU nor the model's weights.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="PATH", help="YAML file of a run that trains")
    parser.add_argument(
        "--gpu-gib", type=_positive, required=True, help="memory of a GPU: 79.2 of an H100, 139.8 of an H200"
    )
    parser.add_argument("--host-gib", type=_positive, required=True, help="main memory of a host")
    parser.add_argument(
        "--parameters",
        type=_parameters,
        help="of the model, such as 14.8B; without it, the folder policy.model_name is read, which needs no weights",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as for the launch scripts")
    given = parser.parse_intermixed_args()
    fit = plan_fit(given.config, given.overrides, given.gpu_gib, given.host_gib, given.parameters)
    sys.stdout.write(f"{fit.render()}\n")
    return 2 if fit.problems else 0


if __name__ == "__main__":
    with ending_process():
        sys.exit(main())
