"""Where a worker's state is in each phase, that moving it changes no bit, and the reference; one rank, this process."""

import shutil

import pytest
import torch
from deferred_device import DeferredDevice
from policy_cases import (
    NLL,
    RaisesAt,
    assert_equal,
    cycle,
    forward_hook_on_layer,
    full_grads,
    full_optimizer,
    full_params,
    make_batch,
    one_rank_worker,
)

from nemo_offload_rl.backends.factory import build_backend, expected_bytes
from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.policy import residency_setup
from nemo_offload_rl.policy import worker as worker_module
from nemo_offload_rl.residency import HostArena, OpenStepError, Phase, ResidencyError
from nemo_offload_rl.residency.needs import RESERVE_BYTES


def test_offloading_changes_no_bit_of_parameters_and_optimizer_states(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    batches = [make_batch(seed=seed) for seed in range(2)]

    def run(cycled, **changes):
        with make_worker(folder, **changes) as worker:
            worker.prepare_for_training()
            for batch in batches:
                if cycled:
                    cycle(worker, batch)
                worker.train(batch, NLL())
            return full_params(worker), full_optimizer(worker)

    resident_params, resident_optimizer = run(cycled=False)
    away, pageable = {"offload_optimizer_states_for_logprob": True}, {"use_pinned_optimizer_offload": False}
    in_parts = {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.2}
    half = {**in_parts, "offload_optimizer_states_fraction": 0.5, "residency_overrides": {"optimizer": "device"}}
    whole = {"offload_optimizer_states": True}
    for changes in ({"colocated": False}, away, pageable, whole, in_parts, half, {"residency": "auto"}):
        params, optimizer = run(cycled=True, **changes)
        assert_equal(params, resident_params)
        assert_equal(optimizer, resident_optimizer)


def test_groups_stay_beside_the_engine_when_told_to_or_when_they_fit_and_not_otherwise(make_worker, folders):
    folder, _ = folders("qwen3-tied")

    def during_generation(**changes) -> dict[str, int]:
        with make_worker(folder, **changes) as worker:
            worker.prepare_for_training()
            worker.train(make_batch(), NLL())
            worker.offload_before_refit()
            worker.offload_after_refit()
            return worker.residency.device_bytes()

    away = during_generation()
    assert away["params"] == away["optimizer"] == 0
    kept = during_generation(residency_overrides={"optimizer": "device"})
    assert kept["params"] == 0 < kept["optimizer"]
    fitting = during_generation(residency="auto", engine_memory_share=0.1)
    assert fitting["params"] > 0 and fitting["optimizer"] > 0
    assert during_generation(residency="auto", engine_memory_share=1.0) == away
    assert (
        during_generation(
            residency="auto", engine_memory_share=0.1, engine_kv_cache_gib=10_000.0, host_memory_budget_gib=8.0
        )
        == away
    )
    mixed = during_generation(residency="auto", engine_memory_share=0.1, residency_overrides={"params": "host"})
    assert mixed["params"] == 0 < mixed["optimizer"]


def test_a_plan_that_the_host_cannot_hold_is_refused_with_the_numbers_and_the_smallest_mend(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    with make_worker(folder) as worker:
        gib = worker.residency.device_bytes()["params"] / 2**30
    # params, twice as much optimizer, and the reference: four times the parameters
    cases = {3.5: "params=device, which", 2.5: "overrides.optimizer=device, which", 0.5: "kl_penalty=0, which"}
    for budget, fix in cases.items():
        with pytest.raises(ConfigError, match=rf"host_memory_budget_gib leaves .*{fix}"):
            make_worker(folder, keep_reference=True, host_memory_budget_gib=budget * gib).__enter__()


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen3", "float32"), ("qwen3-tied", "bfloat16"), ("qwen2", "bfloat16"), ("llama-tied", "float32")],
)
def test_host_memory_is_taken_while_the_model_loads_and_is_just_enough_for_every_phase(
    folders, family, precision, monkeypatch
):
    folder, _ = folders(family)
    taken = []

    def build(settings, process):
        taken.append(expected_bytes(settings, process))
        return build_backend(settings, process)

    monkeypatch.setattr(worker_module, "build_backend", build)
    changes = {"offload_optimizer_states_for_logprob": True, "precision": precision}
    with one_rank_worker(folder, keep_reference=True, **changes) as worker:
        assert worker._backend.expected_bytes() == taken[0].state
        expected = taken[0].state["params"] + taken[0].state["optimizer"] + taken[0].reference
        share = 1 if precision == "float32" else 0.5  # as passes read them
        assert taken[0].reference == pytest.approx(share * taken[0].state["params"], rel=0.1)  # blocks of 512 bytes
        assert worker.residency._arena.reserved_bytes == expected
        for seed in range(2):
            worker.prepare_for_training()
            worker.train(make_batch(seed=seed), NLL())
            cycle(worker, make_batch(seed=seed))
            worker.get_reference_logprobs(make_batch(seed=seed))
        assert worker.residency._arena.reserved_bytes == expected


def test_parameters_that_stay_on_the_device_take_no_host_memory_beside_a_reference(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    seen = {}
    for place in ("host", "device"):
        overrides = {"params": place}
        with make_worker(folder, keep_reference=True, residency_overrides=overrides, residency_verify=True) as worker:
            planned = worker._host_need.resolve().arena
            assert ("params" in planned) == (place == "host")
            scores = []
            for seed in range(3):
                worker.prepare_for_training()
                worker.train(make_batch(seed=seed), NLL())
                cycle(worker, make_batch(seed=seed))
                scores.append(worker.get_reference_logprobs(make_batch(seed=seed)))
            scores.append(worker.get_logprobs(make_batch(seed=0)))
            seen[place] = torch.stack(scores)
            assert (worker.residency.host_bytes()["params"] > 0) == (place == "host")
            assert worker.residency._arena.reserved_bytes == sum(planned.values())
    assert torch.equal(seen["host"], seen["device"])


def test_a_model_that_cannot_be_loaded_leaves_no_host_memory_behind(folders, monkeypatch):
    folder, _ = folders("qwen3")
    made = []

    def fail(settings, process):
        raise UserError("no such weights")

    monkeypatch.setattr(worker_module, "build_backend", fail)
    monkeypatch.setattr(residency_setup, "HostArena", lambda new_region: made.append(HostArena(new_region)) or made[-1])
    with pytest.raises(UserError, match="no such weights"):
        one_rank_worker(folder).__enter__()
    assert made[0].reserved_bytes == 0


def test_the_resolved_plan_is_told_with_sizes(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    with make_worker(folder, keep_reference=True, residency_overrides={"optimizer": "device"}) as worker:
        lines = {line.split()[0]: line for line in worker.residency_plan().splitlines()}
        gib = worker.residency.device_bytes()["params"] / 2**30
    assert list(lines) == ["group", "params", "grads", "optimizer", "reference", "host", "(of"]
    assert lines["host"].startswith("host memory: policy ")
    assert lines["optimizer"].split("  ")[0] == f"optimizer ({2 * gib:.2f} GiB)"
    assert "HOST" not in lines["optimizer"]
    assert lines["params"].endswith("HOST")


def test_streamed_optimizer_states_are_on_the_device_inside_the_step_only(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    for chunk_mib in (None, 0.25):
        changes = {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": chunk_mib}
        with make_worker(folder, **changes) as worker:
            params_bytes = worker.residency.device_bytes()["params"]
            worker.prepare_for_training()
            for _ in range(2):
                worker.train(make_batch(), NLL())
                on_device = worker.residency.device_bytes()
                assert {size for name, size in on_device.items() if name.startswith("optimizer")} == {0}
                on_host = [size for name, size in worker.residency.host_bytes().items() if "part" in name]
                assert (len(on_host) > 1) == (chunk_mib is not None)
                # Megatron's are joined, each in whole units.
                assert params_bytes < sum(on_host) < 2.02 * params_bytes


def test_the_share_of_the_states_that_does_not_stream_stays_and_both_are_as_large_as_foreseen(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    changes = {
        "offload_optimizer_states": True,
        "offload_optimizer_states_chunk_mib": 0.25,
        "offload_optimizer_states_fraction": 0.6,
    }
    with make_worker(folder, **changes) as worker:
        foreseen = worker._backend.expected_bytes()
        worker.prepare_for_training()
        worker.train(make_batch(), NLL())
        staying_bytes = worker.residency.device_bytes()["optimizer"]
        worker.offload_before_refit()
        sizes = worker.residency.host_bytes()
        streamed_bytes = sum(size for name, size in sizes.items() if name.startswith("optimizer/part"))
        assert 0.6 * (staying_bytes + streamed_bytes) <= streamed_bytes < staying_bytes + streamed_bytes
        assert foreseen["optimizer/part"] == pytest.approx(streamed_bytes, rel=0.01)
        assert foreseen["optimizer"] == pytest.approx(staying_bytes, rel=0.05)  # the arena aligns


def test_parts_that_come_ahead_of_the_step_and_leave_behind_the_next_pass_change_no_bit(
    make_worker, folders, monkeypatch, tmp_path
):
    folder, _ = folders("qwen3-tied")
    batches = [make_batch(seed=seed) for seed in range(3)]

    def run(**changes):
        with make_worker(folder, **changes) as worker:
            for index, batch in enumerate(batches):
                if index == 2:
                    cycle(worker, batch)
                worker.prepare_for_training()
                worker.train(batch, NLL(), global_rows=4)  # two updates one after the other
            worker.save_checkpoint(tmp_path / "saved")
            state = full_params(worker), full_optimizer(worker)
        with make_worker(folder, **changes) as worker:
            worker.load_checkpoint(tmp_path / "saved")
            assert_equal(full_params(worker), state[0])
            assert_equal(full_optimizer(worker), state[1])
        shutil.rmtree(tmp_path / "saved")
        return state

    resident = run()
    for free_bytes in (0, RESERVE_BYTES + (1 << 20), 1 << 40):  # room for two parts, for some, for all
        device = DeferredDevice(free_bytes)
        monkeypatch.setattr(worker_module, "make_device", lambda _, device=device: device)
        streamed = run(offload_optimizer_states=True, offload_optimizer_states_chunk_mib=0.1)
        for mine, plain in zip(streamed, resident, strict=True):
            assert_equal(mine, plain)


def test_parameters_and_optimizer_leave_the_device_while_the_engine_generates(make_worker, backend, folders):
    folder, _ = folders("qwen3-tied")
    with make_worker(folder, offload_optimizer_states_for_logprob=True) as worker:
        worker.prepare_for_training()
        params_bytes = worker.residency.device_bytes()["params"]
        worker.train(make_batch(), NLL())
        sizes = worker.residency.device_bytes()
        state_bytes = 2 * sum(4 * p.numel() for p in full_params(worker).values())
        assert state_bytes <= sizes["optimizer"] < 1.02 * state_bytes  # Megatron's are joined, each in whole units
        worker.offload_after_refit()
        assert worker.residency.device_bytes() == {"params": 0, "grads": 0, "optimizer": 0}
        worker.prepare_for_lp_inference()
        assert worker.residency.device_bytes() == {"params": params_bytes, "grads": 0, "optimizer": 0}
        worker.prepare_for_training()
        # Autograd makes gradients anew; Megatron's buffers are there from the start.
        grads = {"dtensor": 0, "megatron": sizes["grads"]}[backend]
        assert worker.residency.device_bytes() == {**sizes, "grads": grads}
        assert [report.target for report in worker.residency_reports()][-1] is Phase.TRAINING
        assert worker.residency_reports() == []


def test_freeing_the_gradients_of_an_open_step_is_an_error_that_can_be_mended(make_worker, folders):
    folder, _ = folders("qwen3")
    batch = make_batch()
    with make_worker(folder) as worker:
        worker.prepare_for_training()
        worker.forward_backward(batch, NLL())
        grads = full_grads(worker)
        for verb in (worker.prepare_for_lp_inference, worker.offload_before_refit, worker.offload_after_refit):
            with pytest.raises(OpenStepError):
                verb()
        assert_equal(full_grads(worker), grads)
        worker.zero_grad()
        worker.prepare_for_lp_inference()


def test_a_verb_in_the_wrong_phase_names_the_phase(make_worker, folders):
    folder, _ = folders("qwen3")
    with make_worker(folder) as worker:
        with pytest.raises(RuntimeError, match="start"):
            worker.train(make_batch(), NLL())
        worker.offload_after_refit()
        with pytest.raises(RuntimeError, match="generation"):
            worker.get_logprobs(make_batch())
        with pytest.raises(RuntimeError, match="generation"):
            worker.start_refit()


def test_a_loss_that_raises_leaves_no_part_of_a_gradient_behind(make_worker, folders):
    folder, _ = folders("qwen3")
    batch = make_batch()
    with make_worker(folder) as clean, make_worker(folder) as hurt:
        clean.prepare_for_training()
        hurt.prepare_for_training()
        with pytest.raises(ArithmeticError):
            hurt.train(batch, RaisesAt(call=2))
        hurt.prepare_for_lp_inference()
        hurt.prepare_for_training()
        assert hurt.train(batch, NLL()) == clean.train(batch, NLL())
        assert_equal(full_params(hurt), full_params(clean))


def test_steps_after_a_backward_pass_that_raised_are_those_of_a_worker_where_none_did(folders):
    folder, _ = folders("qwen3")
    batch = make_batch()
    calls = []

    def fail_at_second(grad):
        calls.append(grad)
        if len(calls) == 2:
            raise ArithmeticError("in the middle of a layer's backward")

    with one_rank_worker(folder) as clean, one_rank_worker(folder) as hurt:
        clean.prepare_for_training()
        hurt.prepare_for_training()
        hook = forward_hook_on_layer(hurt, 1, lambda *args: args[-1].register_hook(fail_at_second) and None)
        with pytest.raises(ArithmeticError):
            hurt.train(batch, NLL())
        hook.remove()
        for _ in range(2):
            assert hurt.train(batch, NLL()) == clean.train(batch, NLL())
        assert_equal(full_params(hurt), full_params(clean))


# -- reference ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "family", "precision"),
    [
        ("dtensor", "qwen3-tied", "float32"),
        ("megatron", "qwen3-tied", "float32"),
        ("dtensor", "qwen3-tied", "bfloat16"),
        ("dtensor", "qwen3-moe", "bfloat16"),
        ("dtensor", "gemma3-tied", "bfloat16"),  # multiplies by a buffer, and by norm weights plus one
        ("dtensor", "qwen2", "float16"),
    ],
)
def test_reference_logprobs_stay_those_of_the_first_parameters_and_the_policy_comes_back(
    folders, backend, family, precision
):
    folder, _ = folders(family)
    batch = make_batch()
    with one_rank_worker(folder, keep_reference=True, backend=backend, precision=precision) as worker:
        worker.prepare_for_lp_inference()
        first = worker.get_logprobs(batch)
        worker.prepare_for_training()
        worker.train(batch, NLL())
        worker.prepare_for_lp_inference()
        trained = worker.get_logprobs(batch)
        params = full_params(worker)
        assert torch.equal(worker.get_reference_logprobs(batch), first)
        assert torch.equal(worker.get_logprobs(batch), trained)
        assert not torch.equal(trained, first)
        assert_equal(full_params(worker), params)


def test_a_reference_pass_that_raises_in_the_middle_gives_the_policy_back(make_worker, folders):
    folder, _ = folders("qwen3")
    batch = make_batch()
    with make_worker(folder, keep_reference=True) as worker, make_worker(folder) as other:
        for each in (worker, other):
            each.prepare_for_training()
            each.train(batch, NLL())
            each.prepare_for_lp_inference()
        trained = worker.get_logprobs(batch)
        params = full_params(worker)

        def fail(*_):
            raise ArithmeticError("in the middle of a layer")

        hook = forward_hook_on_layer(worker, 1, fail)
        with pytest.raises(ArithmeticError):
            worker.get_reference_logprobs(batch)
        hook.remove()
        assert_equal(full_params(worker), params)
        assert torch.equal(worker.get_logprobs(batch), trained)
        for each in (worker, other):
            each.prepare_for_training()
            each.train(batch, NLL())
        assert_equal(full_params(worker), full_params(other))


def test_a_rotary_embedding_that_follows_the_longest_sequence_is_the_references_too(folders):
    folder, _ = folders("llama-tied")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    overrides = {"rope_parameters": dynamic, "max_position_embeddings": 8}
    with one_rank_worker(folder, keep_reference=True, hf_config_overrides=overrides) as worker:
        worker.prepare_for_lp_inference()
        first = worker.get_reference_logprobs(make_batch(width=14))
        assert torch.equal(worker.get_logprobs(make_batch(width=14)), first)
        for width in (14, 20):
            worker.prepare_for_training()
            worker.train(make_batch(width=width), NLL())
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
            policy = worker.get_logprobs(make_batch(width=width))
            assert not torch.equal(worker.get_reference_logprobs(make_batch(width=width)), policy)
            assert torch.equal(worker.get_logprobs(make_batch(width=width)), policy)


def test_what_keeps_a_worker_from_being_built_is_not_hidden_by_what_its_cleanup_finds(folders, monkeypatch):
    folder, _ = folders("qwen3")

    def close(arena):
        raise ResidencyError("host blocks still in use at close: reference; free them first")

    def fail(settings, process):
        raise UserError("no such weights")

    monkeypatch.setattr(worker_module, "build_backend", fail)
    monkeypatch.setattr(HostArena, "close", close)
    with pytest.raises(UserError, match="no such weights") as caught:
        one_rank_worker(folder).__enter__()
    assert caught.value.__notes__ == [
        "and then: ResidencyError: host blocks still in use at close: reference; free them first"
    ]
