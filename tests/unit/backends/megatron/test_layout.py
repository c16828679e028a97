"""How rows lie in the model's input, on one rank and split over two context-parallel ones."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from megatron_cpu_shim import megatron_on_cpu
from policy_cases import make_batch, make_megatron_settings, make_sparse_batch, run_ranks

from nemo_offload_rl.data.batch import TrainBatch, logprob_inputs
from nemo_offload_rl.keys.backend import ModelParallel

CPU = torch.device("cpu")


def scores(laid_out):
    """Everywhere a score that depends on a position's token and the one after it, as a logprob does."""
    ids, targets = laid_out.ids_RL.double(), laid_out.targets_RL.double()
    return torch.sin(3.0 * ids + 7.0 * targets).float()


def expected_logprobs(batch):
    found = torch.sin(3.0 * batch.input_ids[:, :-1].double() + 7.0 * batch.input_ids[:, 1:].double()).float()
    is_real = torch.arange(batch.input_ids.shape[1]) < batch.input_lengths[:, None]
    counted = batch.token_mask * batch.sample_mask[:, None] if isinstance(batch, TrainBatch) else is_real
    return torch.nn.functional.pad(found, (1, 0)) * counted


def check(process):
    for size in (1, 2):
        check_split(process, size)
    check_groups(process)


def check_groups(process):
    """Megatron's groups of the same ranks are one, but for those whose traffic must not stand behind another's."""
    with megatron_on_cpu():
        from megatron.core import parallel_state as state

        from nemo_offload_rl.backends.megatron import parallel

        def distinct(*sizes, expert=1):
            cfg = replace(make_megatron_settings(), expert_model_parallel_size=expert)
            parallel.join_model_parallel(cfg, ModelParallel(*sizes), process.world_size)
            grads, norms = state.get_data_parallel_group(with_context_parallel=True), state.get_model_parallel_group()
            layers = {
                "tensor": state.get_tensor_model_parallel_group(),
                "context": state.get_context_parallel_group(),
                "pipeline": state.get_pipeline_model_parallel_group(),
                "expert": state.get_expert_model_parallel_group(),
            }
            everything = [grads, norms, *layers.values(), state.get_expert_data_parallel_group()]
            for group in everything:
                ranks = [process.rank] if group.size() == 1 else [0, 1]
                assert dist.get_process_group_ranks(group) == ranks
                total = torch.ones(())
                dist.all_reduce(total, group=group)
                assert total == len(ranks)
            parallel.leave_model_parallel()
            of_two = {id(group) for group in everything if group.size() == 2}
            own = {name for name, group in layers.items() if group.size() == 2 and group not in (grads, norms)}
            return len(of_two), own, len({id(group) for group in everything if group.size() == 1})

        assert distinct(1) == (1, set(), 1)
        assert distinct(2) == (2, {"tensor"}, 1)
        assert distinct(1, 2) == (2, {"context"}, 1)
        assert distinct(1, 1, 2) == (2, {"pipeline"}, 1)
        assert distinct(1, expert=2) == (2, {"expert"}, 1)


def check_split(process, context_parallel_size):
    with megatron_on_cpu():
        from nemo_offload_rl.backends.megatron import parallel
        from nemo_offload_rl.backends.megatron.layout import lay_out

        cfg = replace(make_megatron_settings(), context_parallel_size=context_parallel_size)
        parallel.join_model_parallel(cfg, ModelParallel(1, context_parallel_size), process.world_size)
        lengths = set()
        everything = logprob_inputs(make_batch(num_rows=5, width=13), counted_only=False)
        for batch in (everything, make_batch(num_rows=5, width=13), make_sparse_batch(num_rows=5, width=13)):
            for pack in (False, True):
                # Layers in 8 bits need multiples of 16 tokens, in blocks of 128 or (MXFP8) of 32.
                for sequence_parallel_size, token_multiple in product((1, 3), (1, 16, 32, 128)):
                    laid_out = lay_out(
                        batch,
                        device=CPU,
                        pack=pack,
                        sequence_parallel_size=sequence_parallel_size,
                        token_multiple=token_multiple,
                    )
                    check_input(laid_out, batch, process.rank, context_parallel_size, sequence_parallel_size)
                    assert laid_out.ids_RL.numel() // sequence_parallel_size % token_multiple == 0
                    lengths.add(laid_out.ids_RL.numel())
        assert len(lengths) > 1
        parallel.leave_model_parallel()


def check_input(laid_out, batch, rank, context_parallel_size, sequence_parallel_size):
    from nemo_offload_rl.backends.megatron import parallel

    assert laid_out.ids_RL.shape[1] % sequence_parallel_size == 0
    scored = scores(laid_out).requires_grad_()
    logprobs = laid_out.of_samples(scored)
    torch.testing.assert_close(logprobs, expected_logprobs(batch), rtol=0, atol=0)
    # Every token that is wanted is scored once, on one of the ranks.
    logprobs.sum().backward()
    count = scored.grad.sum()
    dist.all_reduce(count, group=parallel.context_parallel_group())
    assert count == int((expected_logprobs(batch) != 0).sum())
    # What is known of a token elsewhere is found at its place, and what is made there comes back, in several columns.
    sources = laid_out.of_samples(laid_out.sources_RL.float().unsqueeze(-1).repeat(1, 1, 2))
    place_BS = torch.arange(batch.input_ids.numel(), dtype=torch.float32).view_as(batch.input_ids) * batch.is_scored()
    assert torch.equal(sources, torch.stack((place_BS, place_BS), dim=-1))
    if laid_out.packed is not None:
        starts = laid_out.packed.cu_seqlens_q.tolist()
        longest = max(end - start for start, end in pairwise(starts))
        multiple = sequence_parallel_size * (2 * context_parallel_size if context_parallel_size > 1 else 1)
        bound = laid_out.packed.max_seqlen_q
        assert longest <= bound < 2 * longest and (bound // multiple).bit_count() == 1 and bound % multiple == 0
        assert len(starts) == 6 and starts[-1] == laid_out.ids_RL.numel() * context_parallel_size
        assert (laid_out.positions_RL == 0).sum() == (5 if rank == 0 or context_parallel_size == 1 else 0)


@pytest.mark.processes
def test_scores_come_back_to_their_tokens_however_rows_are_packed_padded_and_split(tmp_path):
    run_ranks(2, tmp_path, check)
