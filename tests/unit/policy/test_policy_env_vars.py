"""What a policy worker's environment has, from the configuration on."""

from __future__ import annotations

import os

import pytest

from nemo_offload_rl.config.convert import to_grpo_config
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.policy.process import policy_env_vars
from nemo_offload_rl.utils.config import load_config

KEY = "policy.megatron_cfg"
MEGATRON = [f"{KEY}.enabled=true", "policy.dtensor_cfg.enabled=false"]
OFFLOAD = [f"{KEY}.fine_grained_activation_offloading=true", f"{KEY}.offload_modules=[core_attn]"]


def settings_with(*overrides: str) -> PolicySettings:
    resolved = load_config("tests/unit/config/cpu.yaml", overrides)
    return to_grpo_config(validate_keys(resolved, GrpoMasterConfig), resolved).worker


def test_workers_with_a_gpu_each_get_nothing_unasked() -> None:
    assert policy_env_vars(settings_with(), None) == {}
    assert policy_env_vars(settings_with(*MEGATRON), None) == {}


def test_workers_on_a_cpu_share_its_threads_and_do_not_spin() -> None:
    assert policy_env_vars(settings_with(), 1) == {
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    assert policy_env_vars(settings_with(), 10_000)["OMP_NUM_THREADS"] == "1"


def test_activation_offloading_sets_transformer_engines_variable() -> None:
    assert policy_env_vars(settings_with(*MEGATRON, *OFFLOAD), None) == {"NVTE_CPU_OFFLOAD_V1": "1"}


def test_activation_offloading_of_a_backend_that_is_off_sets_nothing() -> None:
    assert policy_env_vars(settings_with(*OFFLOAD), None) == {}


@pytest.mark.parametrize("cpu_workers", [None, 1])
def test_variables_of_the_configuration_reach_the_worker_and_win(cpu_workers: int | None) -> None:
    settings = settings_with(*MEGATRON, f"{KEY}.env_vars={{NCCL_DEBUG: INFO, OMP_NUM_THREADS: '7'}}")
    found = policy_env_vars(settings, cpu_workers)
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "7")
