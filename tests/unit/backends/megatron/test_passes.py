"""Scoring behind the last layer on two ranks with sequence parallelism, whose layers need Transformer Engine."""

from types import SimpleNamespace

import pytest
import torch
from closeness import assert_close
from megatron_cpu_shim import megatron_on_cpu
from policy_cases import PAD_ID, make_settings, make_sparse_batch, run_ranks

from nemo_offload_rl.backends.scoring.readers import ReadScores
from nemo_offload_rl.keys.backend import ModelParallel
from nemo_offload_rl.protocols.loss import TokenStat

HIDDEN, VOCABULARY = 16, PAD_ID + 2


def reference(hidden_LRH, weight_VH, batch):
    """[B, S] logprobs of the counted tokens by a whole log-softmax, and the entropy there."""
    logits_BSV = torch.nn.functional.linear(hidden_LRH.transpose(0, 1), weight_VH)
    targets_BS1 = batch.input_ids[:, 1:, None]
    logprobs_BSV = logits_BSV[:, : targets_BS1.shape[1]].log_softmax(-1)
    values = (logprobs_BSV.gather(-1, targets_BS1).squeeze(-1), -(logprobs_BSV.exp() * logprobs_BSV).sum(-1))
    return [torch.nn.functional.pad(value_BS, (1, 0)) * batch.loss_mask for value_BS in values]


def check(process):
    with megatron_on_cpu():
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        from nemo_offload_rl.backends.megatron import parallel
        from nemo_offload_rl.backends.megatron.layout import lay_out
        from nemo_offload_rl.backends.megatron.model import BuiltModel
        from nemo_offload_rl.backends.megatron.passes import Passes

        settings = make_settings("unused", backend="megatron", tensor_parallel_size=2, sequence_parallel=True)
        parallel.join_model_parallel(settings.megatron_cfg, ModelParallel(2, 1), process.world_size)
        config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, perform_initialization=False)
        layer = ColumnParallelLinear(HIDDEN, VOCABULARY, config=config, init_method=torch.nn.init.zeros_, bias=False)
        model = BuiltModel((), None, SimpleNamespace(vocab_size=VOCABULARY), None, None, None)

        batch = make_sparse_batch(num_rows=6, width=13)
        generator = torch.Generator().manual_seed(1)
        hidden_LRH = torch.randn(14, 6, HIDDEN, generator=generator).requires_grad_()
        weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
        upstream_BS = torch.randn(batch.input_ids.shape, generator=generator)
        expected_BS, expected_entropy_BS = reference(hidden_LRH, weight_VH, batch)
        (expected_BS * upstream_BS).sum().backward()
        layer.weight.data.copy_(weight_VH.detach().chunk(2)[process.rank])

        for chunk_size in (None, 6):
            passes = Passes(
                model,
                make_settings("unused", backend="megatron", logprob_chunk_size=chunk_size),
                settings.megatron_cfg,
                SimpleNamespace(),
                torch.device("cpu"),
            )
            layer.zero_grad()
            mine_LRH = hidden_LRH.detach().chunk(2)[process.rank].clone().requires_grad_()
            scores_BS = passes._read(
                ReadScores(TokenStat.ENTROPY),
                hidden_states=mine_LRH,
                output_layer=layer,
                output_weight=None,
                context=lay_out(
                    batch, device=torch.device("cpu"), pack=False, sequence_parallel_size=2, token_multiple=1
                ),
            )
            assert_close(scores_BS.logprobs, expected_BS)
            assert_close(scores_BS.stat, expected_entropy_BS.detach())
            (scores_BS.logprobs * upstream_BS).sum().backward()
            assert_close(mine_LRH.grad, hidden_LRH.grad.chunk(2)[process.rank])
            assert_close(layer.weight.grad, weight_VH.grad.chunk(2)[process.rank])
        parallel.leave_model_parallel()


@pytest.mark.processes
def test_sequence_parallel_ranks_score_the_counted_tokens_of_all_of_them(tmp_path):
    run_ranks(2, tmp_path, check)
