"""Megatron-core on a machine without a GPU, for tests only: what it asks of CUDA is answered by the CPU.

Megatron-core writes `device="cuda"` and `torch.cuda.current_device()` into its code. Inside `megatron_on_cpu()` those
mean the CPU, streams do nothing and `Tensor.type()` names CUDA types. No file of Megatron is changed. It cannot show
freed GPU memory, races, NCCL or kernels: tests marked `gpu` do. Dropout must be 0, as there is one random state only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from nemo_offload_rl.backends.megatron.upstream.imports import import_auto_bridge
from nemo_offload_rl.utils.garbage import freeze_objects

CPU = torch.device("cpu")


class _Nothing:
    """A stream, an event, or a context that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def _nothing(self, *_: Any, **__: Any) -> _Nothing:
        return self

    wait_stream = wait_event = wait = record = record_event = synchronize = _nothing


def _on_cpu(device: Any) -> Any:
    is_cuda = isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
    return CPU if is_cuda or isinstance(device, int) else device


# What is changed whatever its keywords are. All else is called at once: each of 25,000 calls a model comes here.
_CHANGED = {torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.record_stream, torch.Tensor.to, torch.Tensor.type}


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CHANGED and not (kwargs and ("device" in kwargs or "pin_memory" in kwargs)):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return "torch.cuda." + func(args[0]).removeprefix("torch.").removeprefix("cuda.")
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.pop("pin_memory", False) and func is torch.Tensor.to:
            raise TypeError("Tensor.to takes no pin_memory")
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(value) if isinstance(value, str | torch.device) else value for value in args)
        return func(*args, **kwargs)


def _with_lists(all_to_all: Any) -> Any:
    """`all_to_all_single` for split sizes that Megatron-core takes for lists, since it read them off a GPU."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        listed = {
            name: value.tolist()
            for name, value in kwargs.items()
            if name.endswith("split_sizes") and value is not None and not isinstance(value, list)
        }
        return all_to_all(*args, **kwargs | listed)

    return wrapper


@cache
def _import_megatron() -> None:
    """Import it before anything of a test exists, without the compiler that its small functions are for.

    Else every worker's collection would look through its 200,000 objects for 0.15 s.
    """
    with patch.object(torch, "compile", lambda function=None, **_: function or (lambda later: later)):
        import_auto_bridge()
    freeze_objects()


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Have CUDA calls answered by the CPU inside the body, in this thread."""
    assert not torch.cuda.is_available(), "the shim would hide the GPU"
    _import_megatron()
    answers = {
        "current_device": lambda: CPU,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": _Nothing,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda _: None,
        "_lazy_call": lambda *_, **__: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            for module in (torch.cuda, torch.cuda.random):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, answer))
        distributed = torch.distributed
        stack.enter_context(patch.object(distributed, "all_to_all_single", _with_lists(distributed.all_to_all_single)))
        # Megatron-core compiles small functions, for which a CPU's compiler takes seconds each.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaMeansCpu())
        yield
