"""Checks that Transformer Engine is installed and fits the installed torch, before Ray starts and in each worker.

Its extension is built for one release of torch; with another release the import fails on a missing symbol.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import torch

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings

MODULE = "transformer_engine.pytorch"


def check_engine(settings: PolicySettings) -> None:
    """Refuse a Megatron run that needs Transformer Engine if it is missing or cannot be imported.

    The import is tried in a separate process, since it may take GPU memory, and only on a machine with a GPU, since a
    cluster's driver may have none.

    Raises:
        UserError: Transformer Engine is missing or cannot be imported; the message says what to install.
    """
    if not _is_asked_for(settings):
        return
    problem = import_problem() if not _is_installed() or torch.cuda.device_count() else None
    if problem is not None:
        raise UserError(_message(problem))


def import_problem() -> str | None:
    """Return the reason why Transformer Engine cannot be imported here, or None."""
    if not _is_installed():
        return "it is not installed"
    done = subprocess.run([sys.executable, "-c", f"import {MODULE}"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"its import fails ({(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]})"


def load_engine(settings: PolicySettings) -> None:
    """Import Transformer Engine in this worker before megatron-core, which imports it wherever it is installed.

    Raises:
        UserError: It is missing, or built for another torch.
    """
    if not _is_asked_for(settings):
        return
    try:
        importlib.import_module(MODULE)
    except (ImportError, OSError) as error:
        raise UserError(_message(f"its import fails ({' '.join(str(error).split())})")) from error


def _is_asked_for(settings: PolicySettings) -> bool:
    """Return whether the run imports Transformer Engine: megatron-core does so if it is installed, needed or not."""
    cfg = settings.backend
    if not isinstance(cfg, MegatronConfig):
        return False
    return cfg.transformer_impl == "transformer_engine" or _is_installed()


def _is_installed() -> bool:
    return importlib.util.find_spec(MODULE.partition(".")[0]) is not None


def _message(problem: str) -> str:
    return (
        f"The Megatron backend cannot use Transformer Engine: {problem}; install it for torch {torch.__version__} by "
        "`make setup-gpu` (policy.megatron_cfg.transformer_impl=local does without it where it is not installed)."
    )
