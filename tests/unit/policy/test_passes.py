"""What comes to the device early takes no memory that a pass turns out to need."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import pytest
import torch
import torch.distributed as dist
from deferred_device import DeferredDevice
from policy_cases import (
    NLL,
    BatchingConfig,
    assert_equal,
    cycle,
    forward_hook_on_layer,
    full_optimizer,
    full_params,
    has_grads,
    make_batch,
    make_settings,
)
from simulated_device import SimulatedDevice
from torch import nn

from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy import passes as passes_module
from nemo_offload_rl.policy import worker as worker_module
from nemo_offload_rl.policy.passes import MicroBatches, Passes, TrainingPace
from nemo_offload_rl.policy.peers import Peers
from nemo_offload_rl.residency import (
    DeviceOutOfMemoryError,
    PassKind,
    Phase,
    Placement,
    ResidencyManager,
    ResidencySettings,
    StateGroup,
    needs,
    resolve_plan,
)
from nemo_offload_rl.residency.streams import work_memory

RECOMPUTED = {"activation_checkpointing": True}
PACKED = BatchingConfig(enabled=True, train_mb_tokens=128, logprob_mb_tokens=128, sequence_length_round=1)


class BusyDevice(SimulatedDevice):
    """A simulated device whose passes take memory too."""

    asynchronous = True
    pass_peak_bytes = 0

    def run_pass(self, num_bytes: int) -> None:
        if num_bytes > self.free_bytes():
            raise DeviceOutOfMemoryError(f"{num_bytes} bytes for a pass, {self.free_bytes()} are free")
        self.pass_peak_bytes = max(self.pass_peak_bytes, self.used_bytes() + num_bytes)

    def drain_peak_bytes(self) -> int:
        peak, self.pass_peak_bytes = max(self.pass_peak_bytes, self.used_bytes()), 0
        return peak


def make_manager(capacity_bytes: int, monkeypatch) -> tuple[ResidencyManager, BusyDevice, dict[str, nn.Parameter]]:
    """Parameters of 40 bytes and an optimizer of 80, which comes early behind logprobs where there is room."""
    for module in (needs, work_memory):
        monkeypatch.setattr(module, "RESERVE_BYTES", 0)
    monkeypatch.setattr(needs, "MARGIN", 1.0)
    device = BusyDevice(capacity_bytes)
    tensors = {"params": torch.arange(10.0), "optimizer": torch.arange(20.0)}
    groups = [StateGroup(name, lambda name=name: [(name, tensors[name])]) for name in tensors]
    plan = resolve_plan(
        ResidencySettings(
            colocated=True, use_pinned_optimizer_offload=False, offload_optimizer_states_for_logprob=False
        )
    )
    return ResidencyManager(plan=plan, groups=groups, device=device), device, tensors


def next_logprobs(manager: ResidencyManager) -> None:
    for phase in (Phase.TRAINING, Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
        manager.enter(phase)


def rows_of(*lengths: int) -> TokenBatch:
    """A micro-batch of rows with so many real tokens."""
    return TokenBatch(
        input_ids=torch.zeros(len(lengths), max(lengths), dtype=torch.int64), input_lengths=torch.tensor(lengths)
    )


def passes_of(manager: ResidencyManager, peers: Peers | None = None, **changes: object) -> Passes:
    return Passes(make_settings("a-model", **changes), manager, peers=peers)


@pytest.fixture
def one_of_several():
    """What several ranks do together, by one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Peers(torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(params=["one rank", "several ranks"])
def peers(request):
    return None if request.param == "one rank" else request.getfixturevalue("one_of_several")


def run_pass(
    passes: Passes, kind: PassKind, lengths: Sequence[Sequence[int]], run: Callable[[MicroBatches], object]
) -> None:
    """Run a pass over micro-batches of rows of these lengths."""
    ends = list(accumulate(map(len, lengths), initial=0))
    rows = [list(range(*pair)) for pair in pairwise(ends)]
    for attempt in passes.attempts(kind, rows_of(*chain(*lengths)), rows, lambda: None):
        with attempt:
            run(attempt.micro_batches)


@pytest.mark.parametrize("is_announced", [True, False], ids=["by its tokens", "by failing"])
def test_a_larger_pass_than_those_before_finds_the_room_that_it_has_without_prefetching(
    monkeypatch, caplog, peers, is_announced
):
    manager, device, tensors = make_manager(160, monkeypatch)
    passes = passes_of(manager, peers)
    ran = []

    def run(_micro_batches):
        device.run_pass(40 if len(ran) < 3 else 100)
        ran.append(manager.location("optimizer"))

    def attempt(num_bytes: int) -> None:
        run_pass(passes, PassKind.LOGPROBS, [[num_bytes if is_announced else 1]], run)

    for num_bytes in (40, 40, 40):
        next_logprobs(manager)
        attempt(num_bytes)
    assert ran == [Placement.HOST, Placement.HOST, Placement.DEVICE]  # after two such passes it came early
    next_logprobs(manager)
    assert manager.location("optimizer") is Placement.DEVICE
    with caplog.at_level(logging.WARNING):
        attempt(100)
    assert ran[3] is Placement.HOST
    assert len(caplog.records) == (0 if is_announced else 1)
    manager.enter(Phase.TRAINING)
    assert torch.equal(tensors["optimizer"], torch.arange(20.0)) and torch.equal(tensors["params"], torch.arange(10.0))
    # What such a pass takes is known now.
    next_logprobs(manager)
    assert manager.location("optimizer") is Placement.HOST


def test_a_pass_that_fits_nowhere_is_tried_twice_and_once_where_nothing_could_leave(monkeypatch):
    manager, device, _ = make_manager(160, monkeypatch)
    tries = []

    def run(_micro_batches):
        tries.append(1)
        device.run_pass(130)

    manager.enter(Phase.TRAINING)
    for num_tries in (2, 3):
        with pytest.raises(UserError, match="for a pass"):
            run_pass(passes_of(manager), PassKind.TRAINING, [[1]], run)
        assert len(tries) == num_tries


def test_a_pass_without_room_ends_with_its_phase_its_tokens_what_was_held_and_the_keys_to_change(monkeypatch, peers):
    manager, device, _ = make_manager(160, monkeypatch)
    manager.enter(Phase.LP_INFERENCE)
    monkeypatch.setattr(passes_module, "_GIB", 1)
    held = "params 40.00 GiB on it (130 bytes for a pass, 120"  # the optimizer was offloaded, and the pass run again
    passes = passes_of(manager, peers, logprob_chunk_size=None)
    with pytest.raises(UserError) as raised:
        run_pass(passes, PassKind.REFERENCE, [[5], [7]], lambda batches: device.run_pass(130 if batches[1] else 0))
    assert str(raised.value) == (
        "out of memory on the device in phase lp_inference, in a reference logprobs pass over row 1 of 2 (7 tokens) "
        f"alone, with {held} are free); set policy.logprob_chunk_size=1024, or lower policy.max_total_sequence_length, "
        "or use more GPUs"
    )


@pytest.mark.parametrize(
    ("kind", "lengths", "changes", "advice"),
    [
        (PassKind.TRAINING, (5, 5), {}, "lower policy.train_micro_batch_size, or set policy.dtensor_cfg.activation_ch"),
        (PassKind.TRAINING, (5,), {}, "set policy.dtensor_cfg.activation_checkpointing=true, or set policy.dtensor_"),
        (PassKind.TRAINING, (5,), RECOMPUTED, "set policy.dtensor_cfg.activation_offload=true, or set policy.dtensor_"),
        (PassKind.EVALUATION, (5, 5), {}, "lower policy.train_micro_batch_size, or lower policy.max_total_sequence_le"),
        (PassKind.TEACHER, (5, 5), {}, "lower teacher.logprob_batch_size, or lower policy.max_total_sequence_length"),
        (PassKind.LOGPROBS, (5, 5), {"sequence_packing": PACKED}, "lower policy.sequence_packing.logprob_mb_tokens, "),
        (PassKind.TRAINING, (5, 5), {"dynamic_batching": PACKED}, "lower policy.dynamic_batching.train_mb_tokens, or"),
    ],
)
def test_what_is_advised_against_a_lack_of_memory_is_about_that_kind_of_pass(
    monkeypatch, caplog, kind, lengths, changes, advice
):
    manager, device, _ = make_manager(160, monkeypatch)
    manager.enter(Phase.LP_INFERENCE)
    with pytest.raises(UserError) as raised:
        run_pass(passes_of(manager, logprob_chunk_size=64, **changes), kind, [lengths], lambda _: device.run_pass(1000))
    if len(lengths) == 1:
        assert f"are free); {advice}" in str(raised.value)
    else:
        assert f"to save that time, {advice}" in caplog.text


def test_a_pass_over_packed_rows_is_as_large_as_their_real_tokens(monkeypatch, one_of_several):
    manager, device, _ = make_manager(160, monkeypatch)
    passes = passes_of(manager, one_of_several, sequence_packing=PACKED)
    # 128 cells with padding, of which 30 are real; then 100 cells, all of them real.
    for lengths in ([16, *[2] * 7], [16, *[2] * 7], [50, 50]):
        next_logprobs(manager)
        run_pass(passes, PassKind.LOGPROBS, [lengths], lambda rows: device.run_pass(rows[0].num_tokens(packed=True)))
        places = manager.location("optimizer")
    assert places is Placement.HOST  # it made way


@pytest.mark.parametrize(("num_micro_batches", "first_with_states"), [(1, 0), (2, 0), (7, 0), (8, 1), (33, 1)])
def test_states_come_during_the_first_micro_batch_or_the_second_of_many(
    num_micro_batches, first_with_states, monkeypatch
):
    monkeypatch.setattr(work_memory, "RESERVE_BYTES", 0)
    states = torch.arange(20.0)
    groups = [StateGroup(name, list) for name in ("params", "optimizer")]
    groups.append(StateGroup("optimizer/part.0", lambda: [("states", states)]))
    plan = resolve_plan(
        ResidencySettings(
            colocated=True,
            use_pinned_optimizer_offload=False,
            offload_optimizer_states_for_logprob=False,
            offload_optimizer_states=True,
        )
    )
    manager = ResidencyManager(plan=plan, groups=groups, device=BusyDevice(400))
    pace = TrainingPace(manager, num_micro_batches)
    for places in (steps := [[], []]):
        manager.enter(Phase.TRAINING)
        for index in range(num_micro_batches):
            pace.before_micro_batch(index)
            places.append(manager.location("optimizer/part.0"))
        with manager.during(Phase.OPTIM_STEP), manager.writing_state():
            assert list(manager.streamed()) == ["optimizer/part.0"]
        manager.enter(Phase.GENERATION)
    assert Placement.DEVICE not in steps[0]  # what the step takes is not known yet
    assert steps[1].index(Placement.DEVICE) == first_with_states


@pytest.mark.parametrize("rows_per_group", [1, 2], ids=["rows", "pairs"])
def test_a_micro_batch_that_does_not_fit_is_cut_until_it_does_and_later_ones_before_their_pass(
    monkeypatch, caplog, rows_per_group
):
    monkeypatch.setattr(TokenBatch, "rows_per_group", rows_per_group)
    manager, device, _ = make_manager(160, monkeypatch)
    passes, sizes = passes_of(manager, logprob_chunk_size=8), []
    manager.enter(Phase.LP_INFERENCE)

    def run(micro_batches):
        if not sizes:
            sizes.append("not begun")
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        sizes.append([])
        for micro_batch in micro_batches:
            sizes[-1].append(len(micro_batch))
            device.run_pass(micro_batch.input_ids.numel())

    lengths = [[10] * 4, [30] * 8, [50] * 2, [10] * 2]  # 120 are free without the optimizer
    with caplog.at_level(logging.WARNING):
        run_pass(passes, PassKind.LOGPROBS, lengths, run)
    assert sizes == ["not begun", [4, 8], [4, 4, 4, 2, 2]]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[0].startswith("out of memory in a pass of phase lp_inference")
    assert "its micro-batch of 8 rows and 240 tokens cut in two, and later ones of 216 tokens or more" in told[1]
    assert told[1].endswith("lower policy.logprob_batch_size, or lower policy.max_total_sequence_length")
    run_pass(passes, PassKind.LOGPROBS, [[27] * 8, [26] * 4], run)
    assert sizes[3:] == [[4, 4, 4]] and passes.num_splits == 2
    # The size of one kind of pass says nothing about another.
    with pytest.raises(UserError, match=r"over row 0 of .* \(200 tokens\)"):
        run_pass(passes, PassKind.REFERENCE, [[200] * rows_per_group, [1] * rows_per_group], run)


def test_several_ranks_cut_a_pass_that_is_expected_not_to_fit(monkeypatch, caplog, one_of_several):
    manager, device, _ = make_manager(160, monkeypatch)
    passes, sizes = passes_of(manager, one_of_several), []

    def run(micro_batches):
        sizes.append([len(micro_batch) for micro_batch in micro_batches])
        device.run_pass(max(micro_batch.input_ids.numel() for micro_batch in micro_batches))

    for lengths in ([[10] * 4], [[40] * 4, [10]], [[40] * 4, [10]], [[60] * 2]):
        next_logprobs(manager)
        run_pass(passes, PassKind.LOGPROBS, lengths, run)
    assert sizes == [[4], [2, 2, 1], [2, 2, 1], [2]] and passes.num_splits == 2
    told = [record.getMessage() for record in caplog.records]
    assert (
        len(told) == 1
        and "those of 121 tokens or more are cut in two; to save that time, lower policy.logprob_batch" in told[0]
    )


@dataclass
class RoomFor:
    """A hook on a decoder layer that lets no more than so many tokens through it, backward or forward."""

    num_tokens: int
    hidden_size: int
    num_failures: int = 0

    def __call__(self, _layer, _inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.numel() <= self.num_tokens * self.hidden_size:
            return
        if hidden.requires_grad:
            hidden.register_hook(self.fail)
        elif not torch.is_grad_enabled():
            self.fail(hidden)

    def fail(self, _):
        self.num_failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def of_two_rows(form):
    """Settings for micro-batches of two rows of 14 tokens, and for those of more."""
    if form == "packed":
        sizes = (28, 112)
        return [{"sequence_packing": replace(PACKED, train_mb_tokens=it, logprob_mb_tokens=it)} for it in sizes]
    changes = {"cpu_offload": True, **RECOMPUTED} if form == "by parts" else {}
    return [{"train_micro_batch_size": it, "logprob_batch_size": it, **changes} for it in (2, 4)]


@pytest.mark.parametrize(
    ("backend", "form"),
    [("dtensor", "padded"), ("dtensor", "packed"), ("dtensor", "by parts"), ("megatron", "padded")],
)
def test_a_run_whose_micro_batches_do_not_fit_is_bit_by_bit_the_run_with_smaller_ones(make_worker, folders, form):
    folder, model = folders("qwen3-tied")
    small, large = of_two_rows(form)
    batches = [replace(make_batch(seed=seed), input_lengths=torch.full((8,), 14)) for seed in range(3)]

    def steps(worker, room=None):
        found, num_failures, num_splits = [], [], []
        worker.prepare_for_training()
        for batch in batches:
            cycle(worker, batch)
            found += [worker.get_logprobs(batch), worker.evaluate(batch, NLL())]
            result = worker.train(batch, NLL())
            found.append(replace(result, oom_splits=0))
            num_splits.append(result.oom_splits)
            num_failures.append(room.num_failures if room else 0)
        assert not has_grads(worker)
        return found, num_failures, num_splits, full_params(worker), full_optimizer(worker)

    with make_worker(folder, **small) as worker:
        expected, _, none, *state = steps(worker)
    with make_worker(folder, **large) as worker:
        hook = forward_hook_on_layer(worker, 0, room := RoomFor(28, model.config.hidden_size))
        results, num_failures, num_splits, *state_after = steps(worker, room)
        hook.remove()
    assert none == [0] * 3 and all(num_splits)
    assert 0 < num_failures[0] == num_failures[2]  # what was too large is remembered
    for left, right in zip(results, expected, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert_equal(state_after[0], state[0])
    assert_equal(state_after[1], state[1])


@dataclass
class OutOfMemoryOnce:
    """NLL that runs out of memory in its second micro-batch, once."""

    worker: object
    locations: list[Placement]
    token_stat: None = None

    def __call__(self, logprobs_BS, batch, norm):
        self.locations.append(self.worker.residency.location("optimizer"))
        if len(self.locations) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return NLL()(logprobs_BS, batch, norm)


def test_a_step_that_ran_out_of_memory_and_was_run_again_is_bit_by_bit_the_step_that_did_not(
    make_worker, folders, caplog
):
    folder, _ = folders("qwen3-tied")

    def run(*, interrupted: bool):
        with make_worker(folder) as worker:
            worker.prepare_for_training()
            results = [worker.train(make_batch(seed=0), NLL())]
            loss = OutOfMemoryOnce(worker, []) if interrupted else NLL()
            results.append(worker.train(make_batch(seed=1), loss))
            if interrupted:
                assert loss.locations == [Placement.DEVICE] * 2 + [Placement.HOST] * 2
                assert worker.residency.location("optimizer") is Placement.DEVICE
            assert not has_grads(worker)
            results.append(worker.train(make_batch(seed=2), NLL()))
            return results, full_params(worker), full_optimizer(worker)

    expected, params, optimizer = run(interrupted=False)
    caplog.clear()
    results, params_after, optimizer_after = run(interrupted=True)
    assert results == expected
    assert_equal(params_after, params)
    assert_equal(optimizer_after, optimizer)
    told = [r.getMessage() for r in caplog.records if "run again" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("out of memory in a pass of phase training (CUDA out of memory.")


@dataclass
class CountsParts:
    """NLL that writes down how many parts of the optimizer are on the device, or on their way, at each micro-batch."""

    worker: object
    num_parts: list[int]
    token_stat: None = None

    def __call__(self, logprobs_BS, batch, norm):
        residency = self.worker.residency
        names = [name for name in residency.device_bytes() if name.startswith("optimizer/")]
        self.num_parts.append(sum(residency.location(name) is Placement.DEVICE for name in names))
        return NLL()(logprobs_BS, batch, norm)


def test_parts_of_the_optimizer_come_from_the_first_micro_batch_on_and_are_away_after_the_step(
    make_worker, folders, monkeypatch
):
    folder, _ = folders("qwen3-tied")
    monkeypatch.setattr(worker_module, "make_device", lambda _: DeferredDevice())
    with make_worker(folder, offload_optimizer_states=True, offload_optimizer_states_chunk_mib=0.1) as worker:
        loss_fn = CountsParts(worker, [])
        worker.prepare_for_training()
        for seed in range(3):
            worker.train(make_batch(seed=seed), loss_fn)
            assert all(
                worker.residency.location(name) is Placement.HOST
                for name in worker.residency.device_bytes()
                if name.startswith("optimizer/")
            )
    num_micro_batches = len(loss_fn.num_parts) // 3
    assert num_micro_batches > 1
    # Before two passes it is not known what passes need.
    assert set(loss_fn.num_parts[: 2 * num_micro_batches]) == {0}
    assert len(set(loss_fn.num_parts[2 * num_micro_batches :])) == 1 and loss_fn.num_parts[-1] > 2
