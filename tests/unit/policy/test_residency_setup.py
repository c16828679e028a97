import pytest
from policy_cases import make_settings

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.residency_setup import check_host_memory
from nemo_offload_rl.residency import PARAMS, REFERENCE

GIB = 1 << 30
STATE = {PARAMS: 4 * GIB, "optimizer": 8 * GIB, REFERENCE: 4 * GIB}
LIMIT = "activation_offload_host_limit_gib"
ACTIVATIONS = 8 * GIB


def settings(budget_gib, **changes):
    return make_settings("a-model", backend="megatron", host_memory_budget_gib=budget_gib, **changes)


def test_offloaded_activations_are_counted_beside_the_state_by_name():
    check_host_memory(STATE, ACTIVATIONS, settings(24.0))
    with pytest.raises(ConfigError, match=r"needs 24\.00 GiB .*reference 4\.00, offloaded activations 8\.00\), but"):
        check_host_memory(STATE, ACTIVATIONS, settings(23.9))


def test_activations_that_are_not_offloaded_count_nothing():
    check_host_memory(STATE, 0, settings(16.0))
    check_host_memory(STATE, 0, make_settings("a-model", host_memory_budget_gib=16.0))  # the other backend


def test_the_limit_that_is_named_fits():
    with pytest.raises(ConfigError, match=rf"lower policy\.megatron_cfg\.{LIMIT} to 3\.33, or raise the limit"):
        check_host_memory(STATE, ACTIVATIONS, settings(19.337))
    check_host_memory(STATE, int(3.33 * GIB), settings(19.337))
    with pytest.raises(ConfigError):
        check_host_memory(STATE, int(3.34 * GIB), settings(19.337))


@pytest.mark.parametrize(
    ("budget_gib", "mend", "rest"),
    [
        (16.0, "offloading=false", 16),  # no room beside the state
        (15.0, "offloading=false loss_fn.reference_policy_kl_penalty=0", 12),
        (8.0, r"offloading=false \+\+policy.residency_overrides.optimizer=device", 8),
        (1.0, r"offloading=false .*optimizer=device .*params=device", 0),
    ],
)
def test_where_the_state_leaves_no_room_activations_stay_on_the_device(budget_gib, mend, rest):
    with pytest.raises(
        ConfigError, match=rf"use policy\.megatron_cfg\.fine_grained_activation_{mend}, which needs {rest}"
    ):
        check_host_memory(STATE, ACTIVATIONS, settings(budget_gib))


def test_a_run_without_an_engine_is_told_its_own_keys():
    with pytest.raises(
        ConfigError, match=r"offloading=false dpo\.precompute_reference_logprobs=true, which needs 8\.00"
    ):
        check_host_memory(STATE, ACTIVATIONS, settings(10.0, colocated=False))
