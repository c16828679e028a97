"""Whether Transformer Engine is there and fits the installed torch, found out before Ray starts and again by workers.

Its extension is built for one release of torch; with another one the import fails on a missing symbol.
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
    """Refuse a Megatron run where this machine has no Transformer Engine that it needs, or one that is of no use.

    The import is tried in a process of its own, since it may take GPU memory, and only on a machine with a GPU: the
    driver of a cluster may run on one without.

    Raises:
        UserError: With what to install.
    """
    if not _is_asked_for(settings):
        return
    problem = import_problem() if not _is_installed() or torch.cuda.device_count() else None
    if problem is not None:
        raise UserError(_message(problem))


def import_problem() -> str | None:
    """Why Transformer Engine cannot be imported here, or None."""
    if not _is_installed():
        return "it is not installed"
    done = subprocess.run([sys.executable, "-c", f"import {MODULE}"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"its import fails ({(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]})"


def load_engine(settings: PolicySettings) -> None:
    """Import Transformer Engine into this worker, ahead of megatron-core, which imports it at once where it finds it.

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
    """Whether its import matters: megatron-core's own layers do without it, unless it is there."""
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
