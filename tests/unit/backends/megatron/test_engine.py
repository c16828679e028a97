"""A run that needs Transformer Engine ends in one line where there is none that can be imported, before Ray starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from policy_cases import ONE_RANK, make_settings, save_family

from nemo_offload_rl.backends.factory import build_backend, check_model
from nemo_offload_rl.backends.megatron.supported import missing_kernels
from nemo_offload_rl.backends.megatron.upstream.imports import (
    check_engine,
    has_transformer_engine,
    import_problem,
    load_engine,
)
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.runs.loading import load_grpo_config

SYMBOL = "transformer_engine_torch.so: undefined symbol: _ZN3c1021throwNullDataPtrErrorEv"


@pytest.fixture
def engine_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose import fails as that of an extension for another torch does, in this process and new ones."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(f"raise ImportError({SYMBOL!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformer_engine")}
    yield
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(others)


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine is installed")
def test_a_run_without_transformer_engine_ends_in_one_line(tmp_path):
    save_family(tmp_path, "qwen3")
    config = load_grpo_config("examples/configs/grpo_math_1B_megatron.yaml", [f"policy.model_name={tmp_path}"])
    with pytest.raises(UserError, match=r"cannot use Transformer Engine: it is not installed; .*make setup-gpu"):
        check_model(config.worker)  # which a run does before Ray starts
    with pytest.raises(UserError, match="No module named 'transformer_engine'"):
        load_engine(config.worker)


@pytest.mark.skipif(find_spec("fla") is not None, reason="flash-linear-attention is installed")
def test_linear_attention_without_its_kernels_ends_in_one_line() -> None:
    config = {"model_type": "qwen3_next"}
    on_engine = make_settings("unused", backend="megatron", transformer_impl="transformer_engine").megatron_cfg
    assert "needs flash-linear-attention, but it is not installed" in str(missing_kernels(config, on_engine))
    assert missing_kernels({"model_type": "qwen3"}, on_engine) is None
    assert missing_kernels(config, make_settings("unused", backend="megatron").megatron_cfg) is None


@pytest.mark.skipif(find_spec("mamba_ssm") is not None, reason="mamba-ssm is installed")
def test_mamba_layers_without_their_kernels_end_in_one_line() -> None:
    on_engine = make_settings("unused", backend="megatron", transformer_impl="transformer_engine").megatron_cfg
    message = str(missing_kernels({"model_type": "nemotron_h"}, on_engine))
    assert "but it is not installed; `make mamba`, or use policy.dtensor_cfg" in message and "\n" not in message


def test_an_engine_for_another_torch_is_told_with_what_fails(engine_of_another_torch):
    problem = import_problem()
    assert problem is not None and SYMBOL in problem and "\n" not in problem
    for changes in ({"transformer_impl": "transformer_engine"}, {}):
        # A policy worker says it before it imports megatron-core, which would end in a traceback.
        settings = make_settings("unused", backend="megatron", **changes)
        with pytest.raises(UserError, match=f"{SYMBOL}.*make setup-gpu"):
            build_backend(settings, ONE_RANK)


def test_the_dtensor_backend_does_not_ask_for_it(engine_of_another_torch):
    check_engine(make_settings("unused"))
    load_engine(make_settings("unused"))


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine is installed")
def test_megatrons_own_layers_do_without_it():
    check_engine(make_settings("unused", backend="megatron"))
    load_engine(make_settings("unused", backend="megatron"))
