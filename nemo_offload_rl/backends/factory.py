"""Builds the backend that the settings ask for."""

import importlib
from typing import Any

import torch

from nemo_offload_rl.backends.alternatives import advice, other_backend
from nemo_offload_rl.backends.dtensor.supported import declared_plan, split_problem
from nemo_offload_rl.backends.dtensor.supported import unsupported as unsupported_by_dtensor
from nemo_offload_rl.backends.hf.model_folder import check_model_folder, read_model_config
from nemo_offload_rl.backends.megatron.supported import missing_kernels
from nemo_offload_rl.backends.megatron.supported import unsupported as unsupported_by_megatron
from nemo_offload_rl.backends.megatron.upstream.imports import check_engine, load_engine
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.models.families import DTENSOR, MEGATRON
from nemo_offload_rl.protocols.backend import ExpectedBytes, FrozenModel, PolicyBackend, ProcessInfo


def expected_bytes(settings: PolicySettings, process: ProcessInfo) -> ExpectedBytes:
    """Predict the backend's `expected_bytes` before anything is loaded; empty if only the backend knows.

    Raises:
        UserError: The model's configuration cannot be read.
    """
    if isinstance(settings.backend, MegatronConfig) or settings.dtensor_cfg.lora_cfg.enabled:
        return ExpectedBytes({}, 0, 0)
    from nemo_offload_rl.backends.dtensor.sizes import expected_state_bytes

    return expected_state_bytes(settings, process.world_size, torch.device(process.device))


def check_model(settings: PolicySettings) -> None:
    """Refuse a model that its files or this machine's packages make untrainable; loads no weights.

    The rules have checked a local config.json already. This also checks the config of a hub's model, which may not have
    been downloaded before, and the config as the model library completes it.

    Raises:
        UserError: A part of the model is missing or damaged, the backend does not train it, or lacks a package.
    """
    check_model_folder(settings.model_name)
    check_engine(settings)
    config = {**read_model_config(settings.model_name), **settings.hf_config_overrides}
    in_megatron = isinstance(settings.backend, MegatronConfig)
    check = unsupported_by_megatron if in_megatron else unsupported_by_dtensor
    if (reason := check(config) or check(_as_loaded(settings).to_dict())) is not None:
        raise ConfigError(
            f"policy.{settings.backend.section}.enabled is true, but config.json of {settings.model_name} has "
            f"{reason}; {advice(config, MEGATRON if in_megatron else DTENSOR)}"
        )
    if isinstance(settings.backend, MegatronConfig) and (problem := missing_kernels(config, settings.backend)):
        raise ConfigError(problem)
    if in_megatron and not config.get("architectures"):
        other = other_backend(config, MEGATRON)
        raise ConfigError(
            f"config.json of {settings.model_name} has no architectures, but Megatron-Bridge needs it; "
            f"add the name of the model's class{'' if other is None else f', or use {other}'}"
        )
    tp_size = settings.dtensor_cfg.tensor_parallel_size
    if not in_megatron and tp_size > 1:
        problem = split_problem(config, declared_plan(config["model_type"]), tp_size)
        if problem is not None:
            raise ConfigError(problem)
    if not in_megatron and settings.dtensor_cfg.lora_cfg.enabled:
        from nemo_offload_rl.backends.dtensor.lora import check_adapters  # which imports transformers

        check_adapters(_as_loaded(settings), settings.dtensor_cfg.lora_cfg)
    from nemo_offload_rl.backends.dtensor.loading import check_weights  # which imports transformers

    # Megatron-Bridge's names may differ from those of transformers; its backend compares them.
    check_weights(_as_loaded(settings), settings.model_name, compares_names=not in_megatron)


def _as_loaded(settings: PolicySettings) -> Any:
    from nemo_offload_rl.backends.hf.export import load_config  # which imports transformers

    return load_config(settings.model_name, settings.hf_config_overrides)


def import_backend(settings: PolicySettings, **others: Any) -> None:
    """Import the backend's libraries, which takes many seconds from a cold disk.

    Takes no memory of a device, except the context that Transformer Engine may make. Other arguments of a worker are
    ignored.
    """
    if isinstance(settings.backend, MegatronConfig):
        load_engine(settings)
        importlib.import_module("nemo_offload_rl.backends.megatron.backend")
    else:
        importlib.import_module("nemo_offload_rl.backends.dtensor.backend")


def build_backend(settings: PolicySettings, process: ProcessInfo) -> PolicyBackend:
    """Build the backend of one rank, with its model loaded.

    Raises:
        UserError: The model or a setting cannot be used.
    """
    if isinstance(settings.backend, MegatronConfig):
        load_engine(settings)
        # Here, since these libraries take seconds to import.
        from nemo_offload_rl.backends.megatron.backend import MegatronBackend

        return MegatronBackend(settings, settings.backend, process)
    if not settings.dtensor_cfg.enabled:
        raise ConfigError("policy.dtensor_cfg.enabled=false leaves no training backend; set it to true.")
    from nemo_offload_rl.backends.dtensor.backend import DTensorBackend

    return DTensorBackend(settings, process)


def build_teacher(settings: PolicySettings, process: ProcessInfo, *, streams_layers: bool) -> FrozenModel:
    """Build one rank's frozen model on the policy's backend; process groups must exist already.

    Raises:
        UserError: The model or a setting cannot be used.
    """
    if isinstance(settings.backend, MegatronConfig):
        if streams_layers:
            raise ConfigError("teacher.stream_layers is true, but only the DTensor backend has it; set it to false")
        from nemo_offload_rl.backends.megatron.teacher import FrozenMegatron

        return FrozenMegatron(settings, settings.backend, process)
    from nemo_offload_rl.backends.dtensor.teacher import FrozenDTensor

    return FrozenDTensor(settings, process, streams_layers=streams_layers)
