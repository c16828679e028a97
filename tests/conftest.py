"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

# Before torch is imported: processes of tests side by side, each with a thread for every core, wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before huggingface_hub is: each look-up of a model's name in a hub that cannot be reached is tried for 23 s.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

# How fast an example is made or runs depends on the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent
NUM_CPUS = 6
OBJECT_STORE_BYTES = 100 * 2**20
# Folders and files in which nearly every test starts Ray, vLLM or other processes, or makes models and trains them.
MARKED = {
    "processes": ("functional", "unit/distributed", "unit/generation"),
    "trains": (
        "unit/backends",
        "unit/policy",
        "unit/algorithms/test_async_grpo.py",
        "unit/algorithms/test_grpo.py",
        "unit/algorithms/test_run_end.py",
        "unit/algorithms/test_supervised.py",
        "unit/algorithms/test_supervised_megatron.py",
    ),
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no folder whose every test is left out: a third of what is imported is for those that train."""
    for marker, names in MARKED.items():
        if f"not {marker}" in config.option.markexpr and any(collection_path == TESTS / name for name in names):
            return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of folders and files as a whole."""
    for item in items:
        for marker in markers_of(item.path):
            item.add_marker(marker)


@cache
def markers_of(path: Path) -> list[str]:
    """Return the markers of all tests in a file."""
    return [marker for marker, names in MARKED.items() if any(path.is_relative_to(TESTS / name) for name in names)]


def pytest_configure() -> None:
    """Modules of tests import libraries, of which nothing is garbage."""
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def collects_only_what_a_module_makes() -> None:
    """Libraries, and what the session's fixtures keep, are not looked through in every collection.

    Nor is there a collection for every 700 objects. Tests of workers collect when one has ended.
    """
    gc.set_threshold(50_000, 20, 20)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster of `ray_here` with a folder: one that nobody uses takes 6 CPU-seconds in 100 s."""
    ray = sys.modules.get("ray")
    if nextitem is not None and nextitem.path.parent != item.path.parent and ray is not None and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(scope="session")
def ray_here() -> Iterator[Callable[[], None]]:
    """Make sure that Ray runs on this machine, once for the tests of a folder; workers can import what tests can.

    It has more CPUs than the machine may have: tests ask for slots, not for cores.
    """
    import forked_workers
    import ray

    def start() -> None:
        if not ray.is_initialized():
            ray.init(
                address="local",
                num_cpus=NUM_CPUS,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS / "support")]))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        # Look for new log files every 0.5 s, not 0.1, and never measure the node.
        patch.setenv("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0")
        patch.setenv("REPORTER_UPDATE_INTERVAL_MS", "3600000")
        # Workers have environment variables of their own here, so they cannot use those that Ray starts beforehand.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        for name, value in forked_workers.variables().items():
            patch.setenv(name, value)
        start()
        yield start
        ray.shutdown()
