from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import make_settings, torch_optimizer

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.memory.host_check import _changes, claim_host_memory
from nemo_offload_rl.memory.host_plan import HostNeed, host_bytes_by_owner, render_host_plan, resident_groups
from nemo_offload_rl.protocols.backend import ExpectedBytes
from nemo_offload_rl.residency import (
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    REFERENCE,
    Phase,
    Placement,
)

GIB = 1 << 30
STATE = {PARAMS: 4 * GIB, OPTIMIZER: 8 * GIB}
LIMIT = "activation_offload_host_limit_gib"
ACTIVATION_KEYS = {
    "dtensor_cfg": "policy.dtensor_cfg.activation_offload",
    "megatron_cfg": "policy.megatron_cfg.fine_grained_activation_offloading",
}


def need_of(
    budget_gib,
    *,
    activations=8 * GIB,
    backend="megatron",
    keep_reference=True,
    reference_is_cast=False,
    sizes=STATE,
    **changes,
):
    return HostNeed(
        settings=make_settings("a-model", backend=backend, host_memory_budget_gib=budget_gib, **changes),
        expected=ExpectedBytes(sizes, 0, sizes[PARAMS] if keep_reference else 0, activations, reference_is_cast),
        device_bytes=80 * GIB,
        other={"process": GIB // 2},
    )


def refused(need):
    """The message, None where it fits."""
    try:
        claim_host_memory(need)
    except ConfigError as error:
        return str(error)
    return None


def test_offloaded_activations_are_counted_beside_the_state_by_name():
    claim_host_memory(need_of(24.0))
    with pytest.raises(ConfigError, match=r"needs 24\.00 GiB .*reference 4\.00, offloaded activations 8\.00\), but"):
        claim_host_memory(need_of(23.9))


def test_arenas_may_take_what_the_budget_leaves_beside_activations():
    assert claim_host_memory(need_of(30.0)) == 22 * GIB
    assert claim_host_memory(need_of(16.0, activations=0)) == 16 * GIB


def test_the_limit_of_activations_that_is_named_fits():
    with pytest.raises(ConfigError, match=rf"lower policy\.megatron_cfg\.{LIMIT} to 3\.33, or raise the limit"):
        claim_host_memory(need_of(19.337))
    claim_host_memory(need_of(19.337, activations=int(3.33 * GIB)))
    assert refused(need_of(19.337, activations=int(3.34 * GIB)))


@pytest.mark.parametrize(
    ("budget_gib", "fix", "rest"),
    [
        (16.0, "offloading=false", 16),  # no room beside the state
        (15.0, r"offloading=false \+\+policy.residency_overrides.params=device", 12),
        (8.0, r"offloading=false \+\+policy.residency_overrides.optimizer=device", 8),
    ],
)
def test_where_the_state_leaves_no_room_activations_stay_on_the_device(budget_gib, fix, rest):
    with pytest.raises(ConfigError, match=rf"use policy\.megatron_cfg\.fine_grained_activation_{fix}, which .* {rest}"):
        claim_host_memory(need_of(budget_gib))


def test_a_run_without_an_engine_is_told_its_own_keys():
    # Nothing leaves for an engine: the reference is all.
    message = refused(need_of(0.1, activations=0, colocated=False))
    assert "use dpo.precompute_reference_logprobs=true, which needs 0.00" in message


def test_an_engine_of_its_own_leaves_grpos_keys():
    apart = need_of(0.1, activations=0, colocated=False, engine_memory_share=0.6)
    assert "use loss_fn.reference_policy_kl_penalty=0, which needs 0.00" in refused(apart)


def test_streamed_states_are_not_said_to_stay_on_the_device():
    streamed = {PARAMS: 4 * GIB, OPTIMIZER_PART: 8 * GIB}
    changes = {"backend": "dtensor", "sizes": streamed, "offload_optimizer_states": True, "activations": 0}
    message = refused(need_of(3.9, **changes))
    both = r"dtensor_cfg\.offload_optimizer_states=false \+\+policy\.residency_overrides\.optimizer=device"
    assert re.search(both, message)


def test_state_that_all_streams_is_told_of_moments_of_16_bits_where_there_are_some():
    sizes = {PARAMS: 0, PARAMS_PART: 4 * GIB, GRADS_PART: 4 * GIB, OPTIMIZER_PART: 8 * GIB}
    in_parts = {"backend": "dtensor", "sizes": sizes, "cpu_offload": True, "colocated": False, "activations": 0}
    message = refused(need_of(15.0, keep_reference=False, **in_parts))
    assert "use policy.optimizer.name=nemo_offload_rl.optim.AdamW, which needs 12.00 GiB" in message
    for optimizer in (torch_optimizer("Adam"), torch_optimizer("AdamW", amsgrad=True)):
        assert "or share the state among several GPUs without cpu_offload" in refused(
            need_of(15.0, keep_reference=False, optimizer=optimizer, **in_parts)
        )
    aware = {"use_precision_aware_optimizer": True, "precision": "bfloat16", "bf16": True}
    streamed = {"sizes": {PARAMS: 4 * GIB, OPTIMIZER_PART: 20 * GIB}, "offload_optimizer_states": True, **aware}
    keys = (
        "policy.megatron_cfg.optimizer.exp_avg_dtype=bfloat16 policy.megatron_cfg.optimizer.exp_avg_sq_dtype=bfloat16"
    )
    fits = need_of(None, keep_reference=False, activations=0, colocated=False, **streamed)
    (narrow,) = [change for change in _changes(fits) if change.override == keys]
    assert narrow.apply(fits).expected.state == {PARAMS: 4 * GIB, OPTIMIZER_PART: 12 * GIB}  # 6 bytes a parameter of 10


NEEDS = st.fixed_dictionaries(
    {
        "budget_gib": st.floats(0.01, 30.0),
        "activations": st.sampled_from([0, GIB, 8 * GIB]),
        "keep_reference": st.booleans(),
        "backend": st.sampled_from(["dtensor", "megatron"]),
        "colocated": st.booleans(),
        "engine_memory_share": st.sampled_from([0.0, 0.6]),
        "residency": st.sampled_from(["always", "auto"]),
        "residency_overrides": st.dictionaries(
            st.sampled_from([PARAMS, OPTIMIZER]), st.sampled_from(["device", "host"])
        ),
        "offload_optimizer_states_for_logprob": st.booleans(),
        "offload_optimizer_states": st.booleans(),
        "reference_is_cast": st.booleans(),
        "fraction": st.sampled_from([0.25, 1.0]),
    }
)


def drawn_need(case):
    case, fraction = {**case}, case["fraction"]
    del case["fraction"]
    sizes = dict(STATE)
    if case["offload_optimizer_states"]:
        sizes = {PARAMS: 4 * GIB, OPTIMIZER_PART: int(fraction * 8 * GIB), OPTIMIZER: int((1 - fraction) * 8 * GIB)}
    return need_of(sizes=sizes, **case)


def obey(need, message):
    """The need after what the message says, as a user would change the configuration."""
    backend = need.settings.backend.section
    if lower := re.search(rf"lower policy\.{backend}\.{LIMIT} to ([\d.]+),", message):
        return need.expecting(activations=min(need.expected.activations, int(float(lower[1]) * GIB)))
    policy = need.settings
    for override in re.search(r"; use (.*), which needs", message)[1].split():
        key, _, value = override.lstrip("+").partition("=")
        if key in ("loss_fn.reference_policy_kl_penalty", "dpo.precompute_reference_logprobs"):
            has_engine = policy.colocated or policy.engine_memory_share > 0
            assert key.startswith("loss_fn" if has_engine else "dpo")
            need = need.expecting(reference=0)
        elif key == ACTIVATION_KEYS[backend]:
            need = need.expecting(activations=0)
        elif key.startswith("policy.residency_overrides."):
            assert has_residency_keys(policy)
            policy = replace(policy, residency_overrides={**policy.residency_overrides, key.rpartition(".")[2]: value})
        elif key == "policy.offload_optimizer_states_for_logprob":
            policy = replace(policy, offload_optimizer_states_for_logprob=False)
        elif key == "policy.optimizer.name":
            assert value == "nemo_offload_rl.optim.AdamW"
            half = {name: size // 2 for name, size in need.expected.state.items() if name.startswith(OPTIMIZER)}
            need = need.expecting(state={**need.expected.state, **half})
        else:
            section = "megatron_cfg.optimizer" if policy.megatron_cfg else "dtensor_cfg"
            assert key == f"policy.{section}.offload_optimizer_states"
            kept = make_settings("a-model", backend="megatron" if policy.megatron_cfg else "dtensor")
            policy = replace(policy, dtensor_cfg=kept.dtensor_cfg, megatron_cfg=kept.megatron_cfg)
            need = need.expecting(state=STATE)
        need = replace(need, settings=policy)
    return need


def has_residency_keys(policy):
    """SFT and DPO have no `policy.residency_overrides`."""
    return policy.colocated or policy.engine_memory_share > 0


@settings(max_examples=300)
@given(NEEDS)
def test_advice_that_is_followed_fits(case):
    need = drawn_need(case)
    message = refused(need)
    if message is None:
        return
    assert "\n" not in message
    if "no setting makes it fit" in message:
        assert need.settings.colocated
        return
    assert refused(obey(need, message)) is None, message


def test_streamed_parts_take_no_room_from_groups_that_can_stay():
    sizes = {PARAMS: 10 * GIB, OPTIMIZER_PART: 60 * GIB}
    auto = make_settings("a-model", residency="auto", offload_optimizer_states=True)
    assert resident_groups(auto, sizes, 80 * GIB) == {PARAMS}
    need = HostNeed(auto, ExpectedBytes(sizes, 0, 0), 80 * GIB, {})
    plan = need.resolve().plan
    assert plan.placement(PARAMS, Phase.GENERATION) is Placement.UNCHANGED
    assert need.resolve().arena == {OPTIMIZER_PART: 60 * GIB}
    whole = make_settings("a-model", residency="auto")
    assert resident_groups(whole, {PARAMS: 10 * GIB, OPTIMIZER: 60 * GIB}, 80 * GIB) == {OPTIMIZER, PARAMS}


@pytest.mark.parametrize(
    "stays", [{"residency_overrides": {PARAMS: "device"}}, {"residency": "auto"}, {"colocated": False}]
)
def test_parameters_that_stay_are_counted_on_the_host_only_beside_a_reference_of_another_width(stays):
    sizes = {PARAMS: 4 * GIB, OPTIMIZER_PART: 12 * GIB}
    streamed = {"sizes": sizes, "activations": 0, "offload_optimizer_states": True, **stays}
    assert need_of(None, **streamed).resolve().arena == {OPTIMIZER_PART: 12 * GIB, REFERENCE: 4 * GIB}
    wider = need_of(None, reference_is_cast=True, **streamed).resolve().arena
    assert wider == {OPTIMIZER_PART: 12 * GIB, REFERENCE: 4 * GIB, PARAMS: 4 * GIB}
    assert need_of(None, keep_reference=False, **streamed).resolve().arena == {OPTIMIZER_PART: 12 * GIB}


def test_what_a_refusal_says_of_parameters_that_leave_is_that_keeping_them_saves_their_copy():
    sizes = {PARAMS: 4 * GIB, OPTIMIZER_PART: 12 * GIB}
    message = refused(need_of(16.5, sizes=sizes, activations=0, offload_optimizer_states=True))
    assert "use ++policy.residency_overrides.params=device, which needs 16.00 GiB" in message


def test_an_override_for_a_group_that_an_optimizer_without_states_lacks_is_no_error():
    auto = make_settings("a-model", residency="auto", residency_overrides={OPTIMIZER: "device"})
    assert resident_groups(auto, {PARAMS: GIB}, 80 * GIB) == {OPTIMIZER, PARAMS}


def test_the_plan_tells_the_host_memory_of_each_owner_and_their_sum():
    need = need_of(None, activations=0, engine_memory_share=0.6)
    owners = host_bytes_by_owner(need, "cuda", 2)
    state = sum(need.state_parts().values())
    assert state == 16 * GIB
    assert owners["policy"] > 2 * state
    text = render_host_plan(need, "cuda", 2)
    assert f"= {sum(owners.values()) / GIB:.2f} GiB" in text
    assert "(of each policy worker: params 4.00, optimizer 8.00, reference 4.00)" in text
    assert "engine" not in host_bytes_by_owner(need_of(None, colocated=False), "cuda", 2)
    assert REFERENCE in need.state_parts()
