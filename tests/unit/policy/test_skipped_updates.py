"""Updates with gradients that are not finite: skipped without a trace, told once, and bounded in number."""

import logging
import math

import pytest
import torch
from policy_cases import (
    NLL,
    Poisoned,
    assert_equal,
    cycle,
    full_optimizer,
    full_params,
    has_grads,
    make_batch,
    one_rank_worker,
)

from nemo_offload_rl.algorithms.metrics import update_metrics
from nemo_offload_rl.errors import NonFiniteGradientsError
from nemo_offload_rl.keys.policy import SchedulerPhaseConfig
from nemo_offload_rl.policy.skipped_updates import SkippedUpdates
from nemo_offload_rl.protocols.backend import StepResult
from nemo_offload_rl.protocols.loss import TrainResult
from nemo_offload_rl.residency import local_tensor

SCHEDULES = {
    "dtensor": {
        "max_grad_norm": 0.5,
        "scheduler": (
            SchedulerPhaseConfig(
                name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "total_iters": 5}
            ),
        ),
    },
    "megatron": {"clip_grad": 0.5, "lr_warmup_init": 1e-4, "lr_warmup_iters": 5},
}
FORMS = {
    "resident": {"colocated": False},
    "away for logprobs": {"offload_optimizer_states_for_logprob": True},
    "streamed": {"offload_optimizer_states": True},
    "streamed in parts": {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 0.2},
    "streamed in parts, copies waited for": {
        "offload_optimizer_states": True,
        "offload_optimizer_states_chunk_mib": 0.2,
        "residency_overlap": False,
    },
}
BFLOAT16 = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}
MEGATRON_FORMS = {
    "with masters, overlapped": {**BFLOAT16, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "not distributed": {"use_distributed_optimizer": False},
}


@pytest.mark.parametrize("form", [*FORMS, *MEGATRON_FORMS])
def test_training_goes_on_as_if_a_batch_with_gradients_that_are_not_finite_had_not_been(
    make_worker, backend, folders, caplog, form
):
    if form in MEGATRON_FORMS and backend != "megatron":
        pytest.skip("a form of Megatron's optimizer")
    folder, _ = folders("qwen3-tied")
    changes = {**(FORMS | MEGATRON_FORMS)[form], **SCHEDULES[backend]}

    def run(*, poisoned: bool):
        with make_worker(folder, **changes) as worker:
            worker.prepare_for_training()
            if poisoned:  # the first update of all: no optimizer state is there yet
                assert worker.train(make_batch(seed=9), Poisoned(math.inf)).is_skipped == [True]
            results = [worker.train(make_batch(seed=0), NLL())]
            if poisoned:
                before = full_params(worker), full_optimizer(worker)
                result = worker.train(make_batch(seed=9), Poisoned(math.nan, call=2))
                assert result.is_skipped == [True] and not math.isfinite(result.grad_norm[0])
                assert not has_grads(worker)
                assert_equal(full_params(worker), before[0])
                assert_equal(full_optimizer(worker), before[1])
                cycle(worker, make_batch())
            results += [worker.train(make_batch(seed=seed), NLL()) for seed in (1, 2)]
            return results, full_params(worker), full_optimizer(worker)

    expected, params, optimizer = run(poisoned=False)
    caplog.clear()
    assert len({result.learning_rate[0] for result in expected}) == 3
    with caplog.at_level(logging.WARNING, "nemo_offload_rl"):
        results, params_after, optimizer_after = run(poisoned=True)
    assert results == expected
    assert_equal(params_after, params)
    assert_equal(optimizer_after, optimizer)
    told = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(told) == 2 and all(message.startswith("1 of 1 updates skipped: gradient norm ") for message in told)


def test_more_in_a_row_than_the_limit_end_training_and_one_good_update_starts_the_count_anew(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    with make_worker(folder, max_skipped_updates=1) as worker:
        worker.prepare_for_training()
        for _ in range(2):
            assert worker.train(make_batch(), Poisoned(math.nan)).is_skipped == [True]
            assert worker.train(make_batch(), NLL()).is_skipped == [False]
        before = full_params(worker), full_optimizer(worker)
        worker.train(make_batch(), Poisoned(math.nan))
        with pytest.raises(NonFiniteGradientsError, match=r"^2 updates in a row .*policy.max_skipped_updates=1.*$"):
            worker.train(make_batch(), Poisoned(math.nan))
        assert_equal(full_params(worker), before[0])
        assert_equal(full_optimizer(worker), before[1])


def test_weights_that_were_not_finite_from_the_start_are_named(make_worker, folders):
    folder, _ = folders("qwen3-tied")
    with make_worker(folder, max_skipped_updates=0) as worker:
        worker.prepare_for_training()
        params = next(group for group in worker._backend.state_groups() if group.name == "params")
        name, tensor = next((name, tensor) for name, tensor in params.tensors() if tensor.dim() > 1)
        with torch.no_grad():
            local_tensor(tensor)[3, 5] = math.inf
        message = rf"^1 update in a row .* {name} first. Check the weights of policy.model_name.*checkpoint"
        with pytest.raises(NonFiniteGradientsError, match=message):
            worker.train(make_batch(), NLL())


def test_an_overflow_that_lowers_the_loss_scale_is_no_failure():
    skipped = SkippedUpdates(0)
    for _ in range(40):
        skipped.count(StepResult(math.inf, 1e-3, is_skipped=True, lowers_loss_scale=True))
    with pytest.raises(NonFiniteGradientsError):
        skipped.count(StepResult(math.inf, 1e-3, is_skipped=True))


def test_the_loss_scale_of_float16_is_found_however_many_updates_that_takes(folders):
    folder, _ = folders("qwen3-tied")
    half = {"precision": "float16", "pipeline_dtype": "float16", "max_skipped_updates": 0}
    with one_rank_worker(folder, backend="megatron", **half) as worker:
        worker.prepare_for_training()
        before = full_params(worker)
        num_tries = 1
        while worker.train(make_batch(), NLL()).is_skipped == [True]:
            assert_equal(full_params(worker), before)
            num_tries += 1
        assert num_tries > 2
        assert all(not torch.equal(tensor, before[name]) for name, tensor in full_params(worker).items())


def test_a_skipped_update_is_counted_and_is_in_no_mean():
    nan = math.nan
    one_skipped = TrainResult(
        [1.0, nan, 2.0], [1.0, nan, 3.0], [0.1] * 3, {"kl": [0.0, nan, 1.0]}, [False, True, False]
    )
    expected = {"loss": 1.5, "grad_norm": 2.0, "kl": 0.5, "learning_rate": 0.1, "skipped_updates": 1.0, "oom_splits": 0}
    assert update_metrics(one_skipped) == expected
    all_skipped = update_metrics(TrainResult([nan], [nan], [0.1], {"kl": [0.5]}, [True]))
    assert all_skipped["skipped_updates"] == 1.0 and all_skipped["kl"] == 0.5 and math.isnan(all_skipped["loss"])
    assert update_metrics(TrainResult([1.0], [1.0], [0.1], {}, [False]))["skipped_updates"] == 0.0
