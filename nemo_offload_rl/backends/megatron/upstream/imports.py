"""Imports Transformer Engine and Megatron-Bridge, and says what is missing, before Ray starts and in each worker.

Transformer Engine's extension is built for one release of torch; with another release its import fails on a missing
symbol. At import, Bridge 0.6.2 needs Transformer Engine only for the class bodies of one LoRA module. If it is missing,
a placeholder is in `sys.modules` while that module's body runs. It is removed afterwards, or Megatron-core would assume
that Transformer Engine is installed.
"""

import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings

logger = logging.getLogger(__name__)

MODULE = "transformer_engine.pytorch"
_NEEDS_ENGINE = "megatron.bridge.peft.lora_layers"
# Imports of that module, loaded first, since they must not see the placeholder.
_LOADED_BEFORE = (
    "megatron.core.transformer.moe.moe_utils",
    "megatron.bridge.peft.adapter_wrapper",
    "megatron.bridge.peft.lora_merge",
)
_ENGINE = "transformer_engine"


def check_engine(settings: PolicySettings) -> None:
    """Refuse a Megatron run that needs Transformer Engine if it is missing or cannot be imported.

    The import is tried in a separate process, since it may take GPU memory, and only on a machine with a GPU, since a
    cluster's driver may have none.

    Raises:
        UserError: Transformer Engine is missing or cannot be imported; the message says what to install.
    """
    if not _is_asked_for(settings):
        return
    problem = import_problem() if not has_transformer_engine() or torch.cuda.device_count() else None
    if problem is not None:
        raise UserError(_message(problem))


def import_problem() -> str | None:
    """Return the reason why Transformer Engine cannot be imported here, or None."""
    if not has_transformer_engine():
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
    return cfg.transformer_impl == "transformer_engine" or has_transformer_engine()


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec(_ENGINE) is not None


def _message(problem: str) -> str:
    return (
        f"The Megatron backend cannot use Transformer Engine: {problem}; install it for torch {torch.__version__} by "
        "`make setup-gpu` (or, if it is not installed, set policy.megatron_cfg.transformer_impl=local)"
    )


class _Placeholder(ModuleType):
    """Module with any attribute, for annotations and base classes that are never used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Placeholder(f"{self.__name__}.{name}")


class _LoaderWithPlaceholder(Loader):
    """Loader that runs a module's body with placeholders for Transformer Engine in `sys.modules`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for name in _LOADED_BEFORE:
            importlib.import_module(name)
        # `import a.b as c` looks up `a.b` first.
        sys.modules |= {name: _Placeholder(name) for name in (_ENGINE, f"{_ENGINE}.pytorch")}
        try:
            self._loader.exec_module(module)
        finally:
            del sys.modules[_ENGINE], sys.modules[f"{_ENGINE}.pytorch"]


class _Finder(MetaPathFinder):
    """Finder of the one module that needs the placeholder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NEEDS_ENGINE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithPlaceholder(spec.loader)
        return spec


@contextmanager
def _importable_without_engine() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def import_auto_bridge() -> Any:
    """Import Megatron-Bridge's `AutoBridge`, and limit its and Megatron-core's logs to warnings.

    Raises:
        UserError: Megatron-core or Megatron-Bridge is not installed.
    """
    try:
        if has_transformer_engine() or _NEEDS_ENGINE in sys.modules:
            from megatron.bridge import AutoBridge
        else:
            logger.info("transformer-engine is not installed: Megatron-Bridge is imported without it")
            with _importable_without_engine():
                from megatron.bridge import AutoBridge
    except ModuleNotFoundError as error:
        raise UserError(
            f"policy.megatron_cfg.enabled=true needs megatron-core and megatron-bridge, but {error.name} is not "
            "installed; install requirements/megatron.txt."
        ) from error
    logging.getLogger("megatron").setLevel(logging.WARNING)
    return AutoBridge


def import_lora() -> Any:
    """Import Megatron-Bridge's `LoRA`; call `import_auto_bridge` first."""
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    if not has_transformer_engine():
        # Bridge mistakes Megatron-core's module of that name for the engine; without it the classes there are None.
        utils.HAVE_TE = False
    return LoRA
