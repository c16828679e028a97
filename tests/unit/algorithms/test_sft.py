import pytest
import torch
from policy_cases import make_settings
from tiny_models import make_qwen3, save_model_folder

from nemo_offload_rl.algorithms.sft import CollateSettings, sft_train
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.records import Demonstration
from nemo_offload_rl.distributed.local import LocalWorkerGroup
from nemo_offload_rl.policy.backends.base import ProcessInfo
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.worker import PolicyWorker

COLLATE = CollateSettings(pad_id=256, multiple=1, max_length=32)
ROWS = [
    Demonstration(prompt_ids=tuple(range(row, row + 3)), response_ids=tuple(range(100 + row, 102 + row + row % 3)))
    for row in range(16)
]


@pytest.fixture
def policy(tmp_path):
    save_model_folder(tmp_path, seed=0)
    settings = make_settings(tmp_path, train_global_batch_size=8)
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
    worker = PolicyWorker(settings=settings, process=process, keep_reference=False)
    made = Policy(LocalWorkerGroup(worker), settings, dp_size=1, tp_size=1)
    yield made
    made.shutdown()


def make_loader() -> ShuffledLoader[Demonstration]:
    return ShuffledLoader(ROWS, batch_size=8, shuffle=True, seed=3)


def plain_losses(num_steps: int) -> list[float]:
    """The same training written with Hugging Face and AdamW alone, one sequence after the other."""
    model = make_qwen3(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    loader, losses = make_loader(), []
    for _ in range(num_steps):
        sums, count = [], 0
        for row in next(loader):
            ids = torch.tensor([*row.prompt_ids, *row.response_ids])
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            picked = logprobs.gather(1, ids[1:, None])[:, 0][len(row.prompt_ids) - 1 :]
            sums.append(-picked.sum())
            count += len(row.response_ids)
        loss = torch.stack(sums).sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_of_every_step_equal_those_of_plain_training(policy):
    seen = []
    losses = sft_train(
        policy, make_loader(), num_steps=5, collate=COLLATE, on_step=lambda step, result: seen.append(step)
    )
    assert losses == pytest.approx(plain_losses(5), rel=1e-4)
    assert losses[-1] < losses[0]
    assert seen == [1, 2, 3, 4, 5]
