"""Whole runs of examples/run_grpo.py as processes of their own, on a small model made here."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import forked_workers
import psutil
import pytest
from forked import Finished, Script

ROOT = Path(__file__).parents[2]
CPU_CONFIG = ROOT / "examples/configs/grpo_arithmetic_cpu.yaml"

# Rewards fall with the length of a response, so that an untrained model's responses differ in reward.
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16",
    "grpo.max_val_samples=16",
    "grpo.val_batch_size=8",
    "grpo.val_period=0",
    "data.train.size=64",
    "data.train.holdout=16",
    "grpo.reward_shaping.enabled=true",
    "grpo.reward_shaping.overlong_buffer_length=15",
    "checkpointing.metric_name=null",
    "cluster.call_warning_s=600",  # tests read what stands on standard error, however slow the machine is
)


# An eager engine starts in a third of the time. One test has graphs and torch.compile, which are the defaults.
ON_GPU = (
    "cluster.gpus_per_node=1",
    "policy.dtensor_cfg.torch_compile=false",
    "policy.precision=bfloat16",
    "policy.generation.vllm_cfg.kv_cache_memory_gib=24",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.host_memory_budget_gib=8",
)


def command(*overrides: str, config: Path = CPU_CONFIG, script: str = "examples/run_grpo.py") -> list[str]:
    small = SMALL if config == CPU_CONFIG else ()  # keys of that configuration
    return [sys.executable, script, "--config", str(config), *small, *overrides]


BEFORE_TESTS = dict(os.environ)
"""What a user's environment would be; `ray_here` adds to that of the tests."""


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    variables = os.environ if base is None else base
    # Packages may have been unpacked beside the interpreter's own, as on machines that have no network.
    paths = [str(ROOT), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def grpo_command() -> Callable[..., list[str]]:
    """The command line of a small run, for tests that start it in their own way."""
    return command


@pytest.fixture(scope="session")
def on_gpu() -> tuple[str, ...]:
    """Overrides with which a small run has one GPU."""
    return ON_GPU


@pytest.fixture(scope="session")
def small_config() -> Callable[..., tuple[Path, list[str]]]:
    """What `run_grpo` runs with overrides: the file, and all overrides."""
    return lambda *overrides: (CPU_CONFIG, [*SMALL, *overrides])


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with random weights, and its tokenizer."""
    folder, output = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("output")
    script = Script([ROOT / "examples/demo/make_model.py", "--output", folder], output, cwd=ROOT, env=environment())
    done = script.wait(1500)
    assert done.status == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def biased_model_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with biases in attention: Hugging Face's output projection has one then, vLLM's has not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model") / "biased"
    shutil.copytree(model_folder, folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, attention_bias=True)).save_pretrained(folder)
    return folder


def ray_workers() -> set[psutil.Process]:
    """Policy workers and engines of all Ray clusters that were started from here."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::HostedWorker"):
                found.add(process)
    return found


@dataclass
class RunningGrpo:
    """A run that goes on, in a process group of its own.

    Attributes:
        script: The driver.
        before: Workers that are not the run's.
        children: What belongs to the run beside the driver, as far as it was seen: its workers and, where it has a Ray
            cluster of its own, Ray's daemons.
    """

    script: Script
    before: set[psutil.Process]
    children: set[psutil.Process] = field(default_factory=set)

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` is done."""
        if not any(line.startswith(f"step {step}/") for line in self.script.lines()):
            pytest.fail(f"the run ended early: {self.script.stderr.read_text()}")
        self._look()

    def engine(self, of: int = 1) -> psutil.Process:
        """The process of one of `of` engines."""
        return self._worker(is_engine=True, of=of)

    def policy(self) -> psutil.Process:
        """The one policy worker's process."""
        return self._worker(is_engine=False)

    def _worker(self, is_engine: bool, of: int = 1) -> psutil.Process:
        self._look()
        found = [
            worker
            for worker in ray_workers() - self.before
            # In the environment of engines alone.
            if ("VLLM_ENABLE_V1_MULTIPROCESSING" in forked_workers.environment_of(worker)) == is_engine
        ]
        assert len(found) == of
        return found[0]

    def kill_engine_in_generation(self) -> psutil.Process:
        """Kill the engine in a call that computes: waking up and loading weights take little time."""
        return self.kill_in_call(self.engine(), 0.1)

    def kill_in_call(self, worker: psutil.Process, compute_s: float) -> psutil.Process:
        """Kill a worker in a call that has taken `compute_s` of a CPU already."""
        began_s = None
        while True:
            used_s = worker.cpu_times().user
            if not worker.cmdline()[0].endswith(".call"):
                began_s = None
            elif began_s is None:
                began_s = used_s
            elif used_s - began_s >= compute_s:
                worker.kill()
                return worker
            time.sleep(0.005)

    def wait(self, timeout_s: float) -> tuple[int, str, list[psutil.Process]]:
        """Exit status, the last line on standard error that is not indented, and children that live on."""
        done = self.script.wait(timeout_s)
        self._look()
        _, alive = psutil.wait_procs(self.children, timeout=1500)
        (*_, why) = (line for line in done.stderr.splitlines() if not line.startswith("  "))
        return done.status, why, alive

    def _look(self) -> None:
        self.children |= ray_workers() - self.before
        with suppress(psutil.NoSuchProcess):
            self.children |= set(psutil.Process(self.script.pid).children(recursive=True))


@pytest.fixture(scope="session")
def joined(ray_here: Callable[[], None]) -> Callable[[], dict[str, str]]:
    """Environment variables with which a run joins the Ray cluster of the tests instead of starting one."""
    import ray

    def variables() -> dict[str, str]:
        ray_here()
        return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    return variables


@pytest.fixture
def start_grpo(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningGrpo]]:
    """Start runs; nothing of them is left afterwards.

    Arguments: overrides, `env` for more environment variables, `script` for another than the launch script.
    """
    runs: list[RunningGrpo] = []

    def start(*overrides: str, env: dict[str, str] | None = None, **script: str) -> RunningGrpo:
        _, *argv = command(f"policy.model_name={model_folder}", *overrides, **script)
        folder, before = tmp_path_factory.mktemp("output"), ray_workers()
        variables = {**environment(), **forked_workers.variables(), **(env or {})}
        runs.append(RunningGrpo(Script(argv, folder, cwd=ROOT, env=variables), before))
        return runs[-1]

    yield start
    for run in runs:
        run.script.kill()
        for child in run.children:
            if child.is_running():
                child.kill()


@pytest.fixture
def start_endless_grpo(start_grpo: Callable[..., RunningGrpo], tmp_path: Path) -> Callable[..., RunningGrpo]:
    """`start_grpo` for a run that would go on for hours, and may start its engine again twice."""
    return partial(
        start_grpo,
        f"logger.log_dir={tmp_path / 'run'}",
        "policy.generation.vllm_cfg.max_restarts=2",
        "grpo.max_num_steps=100000",
        "grpo.max_num_epochs=100000",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    )


@pytest.fixture(scope="session")
def run_grpo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Run to the end: overrides, `env` for more environment variables, `script` for another than the launch script."""

    def run(*overrides: str, config: Path = CPU_CONFIG, env: dict[str, str] | None = None, **script: str) -> Finished:
        _, *argv = command(*overrides, config=config, **script)
        folder = tmp_path_factory.mktemp("output")
        variables = {**environment(), **forked_workers.variables(), **(env or {})}
        return Script(argv, folder, cwd=ROOT, env=variables).wait(1500)

    return run


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Run any launch script to the end: its path and its arguments, `env` for more environment variables."""

    def run(script: str, *arguments: str, env: dict[str, str] | None = None) -> Finished:
        variables = {**environment(), **forked_workers.variables(), **(env or {})}
        return Script([script, *arguments], tmp_path_factory.mktemp("output"), cwd=ROOT, env=variables).wait(1500)

    return run


@pytest.fixture(scope="session")
def launch_grpo() -> Callable[..., Finished]:
    """Run to the end as a user does, by a new Python: overrides."""

    def launch(*overrides: str) -> Finished:
        options: dict[str, Any] = {"cwd": ROOT, "env": environment(BEFORE_TESTS), "capture_output": True, "text": True}
        done = subprocess.run(command(*overrides), timeout=1500, **options)
        return Finished(done.returncode, done.stdout, done.stderr)

    return launch


@pytest.fixture(scope="session")
def run_in_one_process(run_grpo: Callable[..., Finished]) -> Callable[..., Finished]:
    """`run_grpo` with policy and engine in the run's own process, which takes a fifth of the time."""
    return partial(run_grpo, script="tests/support/one_process_grpo.py")


@pytest.fixture(scope="session")
def names_in_trace() -> Callable[[Path], set[str]]:
    """Names of the events in a trace file."""

    def read(path: Path) -> set[str]:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return {event["name"] for event in events if event.get("ph") == "X"}

    return read


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], dict[int, dict[str, float]]]:
    """Metrics of a run folder by step."""

    def read(log_dir: Path) -> dict[int, dict[str, float]]:
        records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
        assert len(records) == len({record["step"] for record in records})
        return {record.pop("step"): record for record in records}

    return read


@pytest.fixture(scope="session")
def greedy_answers() -> Callable[[Path, Path], list[tuple[str, str]]]:
    """Answers of a validation: what the engine wrote, and what Hugging Face writes with weights that were exported."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def compare(samples: Path, exported: Path) -> list[tuple[str, str]]:
        tokenizer = AutoTokenizer.from_pretrained(exported)
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        pairs = []
        text = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # as `repr` writes it
        for prompt, answer in re.findall(rf"^  (?:right|wrong)  {text} -> {text}[ ,]", samples.read_text(), re.M):
            ids = tokenizer(ast.literal_eval(prompt), return_tensors="pt").input_ids
            written = model.generate(ids, do_sample=False, max_new_tokens=16, pad_token_id=0)[0, ids.shape[1] :]
            pairs.append((ast.literal_eval(answer), tokenizer.decode(written, skip_special_tokens=True)))
        return pairs

    return compare
