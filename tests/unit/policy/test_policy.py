from dataclasses import dataclass, replace

import pytest
import torch
from policy_cases import NLL, ONE_RANK, assert_equal, full_params, make_batch, make_settings
from safetensors.torch import load_file, save_file
from tiny_models import save_model_folder

from nemo_offload_rl.data.batch import PolicyGradientBatch, PreferenceBatch, TokenBatch, TrainBatch
from nemo_offload_rl.distributed.local import LocalWorkerGroup
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.policy import Policy, deal_rows, pad_rows
from nemo_offload_rl.policy.skipped_updates import ZeroGradients
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.loss import TrainResult
from nemo_offload_rl.residency import Phase
from nemo_offload_rl.utils.checksums import damaged_files, file_checksums, files_below


@dataclass
class RecordingGroup:
    """Ranks that remember which rows they were given and give each row's first token back as its logprobs."""

    world_size: int

    def __post_init__(self):
        self.given = {}

    def run_each(self, method, per_rank_args):
        self.given[method.__name__] = [batch for batch, *_ in per_rank_args]
        if method.__name__ == "train":
            return [TrainResult([float(rank)], [0.0], [0.0]) for rank in range(self.world_size)]
        return [batch.input_ids.float() for batch, *_ in per_rank_args]


def test_each_global_batch_is_dealt_out_in_runs_of_neighbours():
    assert deal_rows(num_rows=12, rows_per_step=6, dp_size=2) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert deal_rows(num_rows=4, rows_per_step=4, dp_size=1) == [[0, 1, 2, 3]]


def test_added_rows_count_for_nothing():
    padded = pad_rows(make_batch(num_rows=5), 4)
    assert padded.sample_mask.tolist() == [1, 0, 1, 1, 1, 0, 0, 0]
    assert pad_rows(padded, 4) is padded


def test_added_pairs_are_whole():
    batch = make_batch(num_rows=6)
    tensors = {name: getattr(batch, name) for name in ("input_ids", "input_lengths", "token_mask", "sample_mask")}
    pairs = PreferenceBatch(**tensors, reference_sums=torch.arange(6, dtype=torch.float64))
    assert pad_rows(pairs, 2).reference_sums.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert pad_rows(pairs, 3) is pairs


def test_ranks_that_share_a_shard_get_the_same_rows_and_answers_come_back_in_order():
    group = RecordingGroup(world_size=4)
    policy = Policy(group, make_settings("unused", train_global_batch_size=4, tensor_parallel_size=2))
    batch = make_batch(num_rows=8)
    assert policy.train(batch, NLL()).loss == [0.0]
    for rank, rows in enumerate([[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]]):
        assert torch.equal(group.given["train"][rank].input_ids, batch.input_ids[rows])

    odd = make_batch(num_rows=7)
    assert torch.equal(policy.get_logprobs(odd), odd.input_ids.float())
    assert [len(shard) for shard in group.given["get_logprobs"]] == [4, 4, 4, 4]
    # Masks travel where they are asked for only.
    assert {type(shard) for shard in group.given["get_logprobs"]} == {TokenBatch}
    assert torch.equal(policy.get_logprobs(odd, counted_only=True), odd.input_ids.float())
    assert {type(shard) for shard in group.given["get_logprobs"]} == {TrainBatch}


class CheckingGroup(RecordingGroup):
    def run_each(self, method, per_rank_args):
        self.given[method.__name__] = [list(checksums) for _, checksums in per_rank_args]
        return [damaged_files(*args) for args in per_rank_args]


def test_files_of_a_checkpoint_are_read_once_each_by_ranks_that_share_the_large_ones(tmp_path):
    for index in range(6):
        (tmp_path / f"{index}").write_bytes(bytes(1000 - index))
    names = files_below(tmp_path)
    checksums = file_checksums(tmp_path, names)
    group = CheckingGroup(world_size=4)
    policy = Policy(group, make_settings("unused"))
    assert policy.damaged_files(tmp_path, checksums) == {}
    assert group.given["damaged_files"] == [["0", "4"], ["1", "5"], ["2"], ["3"]]
    (tmp_path / "1").unlink()
    (tmp_path / "4").write_bytes(b"1" + bytes(995))
    damage = policy.damaged_files(tmp_path, checksums)
    assert damage.keys() == {"1", "4"}
    assert damage["1"] == "cannot be read (No such file or directory)"
    assert damage["4"].endswith(f"instead of {checksums['4']}")


def test_stages_of_a_pipeline_get_the_same_rows():
    group = RecordingGroup(world_size=8)
    sizes = {"tensor_parallel_size": 2, "pipeline_model_parallel_size": 2}
    policy = Policy(group, make_settings("unused", backend="megatron", train_global_batch_size=4, **sizes))
    batch = make_batch(num_rows=4)
    # Megatron numbers stages last: the second one begins at rank 4.
    policy.train(batch, NLL())
    for rank, rows in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]] * 2):
        assert torch.equal(group.given["train"][rank].input_ids, batch.input_ids[rows])
    assert torch.equal(policy.get_logprobs(batch), batch.input_ids.float())


def test_updates_of_other_sizes_have_their_own_rows_and_fill_up_with_rows_that_count_for_nothing():
    group = RecordingGroup(world_size=2)
    policy = Policy(group, make_settings("unused", train_global_batch_size=2))
    batch = make_batch(num_rows=5)
    policy.train(batch, NLL(), [torch.tensor([0, 4, 3]), torch.tensor([2])])
    first, second = group.given["train"]
    for shard, rows in ((first, [0, 4, 2, 2]), (second, [3, 0, 2, 2])):
        assert torch.equal(shard.input_ids, batch.input_ids[rows])
    assert first.sample_mask.tolist() == [batch.sample_mask[0], batch.sample_mask[4], batch.sample_mask[2], 0]
    assert second.sample_mask.tolist() == [batch.sample_mask[3], 0, 0, 0]


def test_updates_of_other_sizes_are_the_gradients_of_their_rows(tmp_path):
    save_model_folder(tmp_path / "model", 0)
    settings = make_settings(tmp_path / "model", train_global_batch_size=4)
    batch, updates = make_batch(num_rows=5), [[0, 4, 3], [2]]
    worker, plain = (PolicyWorker(settings, ONE_RANK, keep_reference=False) for _ in range(2))
    policy = Policy(LocalWorkerGroup(worker), settings)
    policy.prepare_for_training()
    plain.prepare_for_training()
    result = policy.train(batch, NLL(), [torch.tensor(rows) for rows in updates])
    for rows, loss in zip(updates, result.loss, strict=True):
        assert plain.forward_backward(batch.select(rows), NLL())[0] == pytest.approx(loss, rel=1e-5)
        plain.optim_step()
    assert plain.evaluate(batch, NLL()).loss == pytest.approx(policy.evaluate(batch, NLL()).loss, rel=1e-5)
    policy.shutdown()
    plain.shutdown()


def test_gradients_of_exactly_0_in_steps_that_have_something_to_learn_are_warned_of_once(tmp_path, caplog):
    save_model_folder(tmp_path, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight"):  # either one alone leaves the other a gradient
        tensors[name].zero_()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings, batch = make_settings(tmp_path, train_global_batch_size=4), make_batch(num_rows=4)
    worker = PolicyWorker(settings, ONE_RANK, keep_reference=False)
    policy = Policy(LocalWorkerGroup(worker), settings)
    policy.prepare_for_training()
    nothing = replace(batch, sample_mask=torch.zeros(4))

    def num_warned(steps):
        results = [policy.train(step, NLL()) for step in steps]
        assert all(norm == 0 for result in results for norm in result.grad_norm)
        return caplog.text.count("nothing was learned in the last 3 steps: all gradients are exactly 0")

    assert num_warned([batch, nothing, batch, batch]) == 0
    assert num_warned([batch, batch, batch, batch, batch]) == 1
    policy.shutdown()
    none = torch.zeros_like(batch.token_mask)
    learned = PolicyGradientBatch(
        **vars(batch), rewards=torch.ones(4), advantages=none, prev_logprobs=none, generation_logprobs=none,
        reference_logprobs=none,
    )  # fmt: skip
    caplog.clear()
    for advantages, num_warnings in ((none, 0), (none + 1, 1)):
        zero = ZeroGradients()
        for _ in range(5):
            zero.count(replace(learned, advantages=advantages), TrainResult([0.0], [0.0], [0.1]))
        assert caplog.text.count("(advantages are not 0)") == num_warnings


def test_batches_that_do_not_divide_are_refused():
    policy = Policy(RecordingGroup(4), make_settings("unused", train_global_batch_size=6))
    with pytest.raises(ConfigError, match="train_global_batch_size 6"):
        policy.train(make_batch(num_rows=8), NLL())
    with pytest.raises(ConfigError, match="4 data-parallel workers"):
        policy.train(make_batch(num_rows=6), NLL())
    with pytest.raises(ConfigError, match="4 policy workers"):
        Policy(RecordingGroup(4), make_settings("unused", tensor_parallel_size=3))


def test_the_facade_over_a_local_group_does_what_the_worker_does(tmp_path, monkeypatch):
    save_model_folder(tmp_path / "model", 0)
    settings = make_settings(tmp_path / "model", train_global_batch_size=4)
    batch = make_batch()
    worker, plain = (PolicyWorker(settings, ONE_RANK, keep_reference=True) for _ in range(2))
    policy = Policy(LocalWorkerGroup(worker), settings)

    policy.prepare_for_lp_inference()
    plain.prepare_for_lp_inference()
    assert torch.equal(policy.get_logprobs(batch), plain.get_logprobs(batch))
    assert torch.equal(policy.get_reference_logprobs(batch), policy.get_logprobs(batch))
    policy.prepare_for_training()
    plain.prepare_for_training()
    result = policy.train(batch, NLL())
    assert len(result.loss) == 2
    assert result == plain.train(batch, NLL())
    assert policy.evaluate(batch, NLL()).loss[0] < result.loss[0]
    policy.save_checkpoint(tmp_path / "saved")
    policy.load_checkpoint(tmp_path / "saved")
    assert_equal(full_params(worker), full_params(plain))
    policy.offload_before_refit()
    policy.start_refit()
    buckets = 0
    while policy.request_bucket()() is not None:
        buckets += 1
    assert buckets > 0
    finished = []
    monkeypatch.setattr(worker.residency, "finish_leaving", lambda: finished.append(worker.residency.phase))
    policy.offload_after_refit()
    assert finished == []
    policy.offload_after_refit(wait_for_all=False)
    assert finished == []
    policy.finish_leaving()
    assert finished == [Phase.GENERATION]
    assert len(policy.residency_reports()[0]) > 4
    policy.shutdown()
    policy.shutdown()
    plain.shutdown()
