"""Records a run's ways to the model, and the files that its first step executes.

A way is the package's functions that are under way as a model's forward begins, from the launch script on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from house import PACKAGE

from nemo_offload_rl.algorithms.grpo import GrpoTrainer

MODELS = ("Qwen3Model.forward", "GPTModel.forward")
PASSES = {"train": "training", "get_logprobs": "logprobs", "get_reference_logprobs": "reference logprobs"}
_TOOL = sys.monitoring.OPTIMIZER_ID


def record(path: Path) -> None:
    """Write the ways of the first step to a file, once it has ended."""
    step = GrpoTrainer.step

    def recorded(self: GrpoTrainer, *numbers: int) -> bool:
        GrpoTrainer.step = step
        ways: dict[str, list[str]] = {}
        files: set[str] = set()

        def begins(code: CodeType, _offset: int) -> Any:
            if code.co_filename.startswith(str(PACKAGE)):
                files.add(_file(code))
            if code.co_qualname not in MODELS:
                return sys.monitoring.DISABLE  # each function is seen once, at no further cost
            way = _way()
            for name, kind in PASSES.items():
                if f"policy/worker.py:PolicyWorker.{name}" in way:
                    ways[kind] = way
            return None

        sys.monitoring.use_tool_id(_TOOL, "ways")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, begins)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)
        try:
            return step(self, *numbers)
        finally:
            sys.monitoring.set_events(_TOOL, 0)
            sys.monitoring.free_tool_id(_TOOL)
            path.write_text(json.dumps({"ways": ways, "files": sorted(files)}))

    GrpoTrainer.step = recorded


def _way() -> list[str]:
    """The package's functions on this thread's stack, the first one first; one that appears twice counts twice."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.append(f"{_file(frame.f_code)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))
