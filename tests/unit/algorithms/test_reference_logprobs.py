"""Reference logprobs on disk: when they are read, and when they are not."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_cases import make_settings

from nemo_offload_rl.algorithms.reference_logprobs import FILE_NAME, ReferenceFile, fingerprint
from nemo_offload_rl.data.records import Example, ExamplePair, Splits
from nemo_offload_rl.errors import CheckpointError

SUMS = {"train": torch.tensor([1.0, -0.1], dtype=torch.float64), "validation": torch.zeros(0, dtype=torch.float64)}


def pair(*chosen: int, counted: int = 1) -> ExamplePair:
    def example(ids: tuple[int, ...]) -> Example:
        return Example(token_ids=np.array(ids, dtype=np.int32), token_mask=np.arange(len(ids)) >= len(ids) - counted)

    return ExamplePair(chosen=example(chosen), rejected=example((9, 9)))


@pytest.fixture
def policy(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text("{}")
        os.utime(folder / name, (1, 1))
    return make_settings(folder)


ROWS = Splits(train=(pair(1, 2, 3), pair(4, 5)), validation=(pair(6, 7),))


@pytest.mark.parametrize(
    "rows",
    [
        Splits(train=(pair(1, 2, 8), pair(4, 5)), validation=(pair(6, 7),)),
        Splits(train=(pair(1, 2, 3, counted=2), pair(4, 5)), validation=(pair(6, 7),)),
        Splits(train=(pair(4, 5), pair(1, 2, 3)), validation=(pair(6, 7),)),
        Splits(train=(pair(1, 2, 3), pair(4, 5), pair(6, 7)), validation=()),
        Splits(train=(pair(1, 2, 3), pair(4, 5)), validation=()),
    ],
    ids=["a token", "a mask", "the order", "the split", "fewer"],
)
def test_other_rows_have_another_fingerprint(policy, rows):
    assert fingerprint(rows, policy) != fingerprint(ROWS, policy)
    assert fingerprint(ROWS, policy) == fingerprint(replace(ROWS), policy)


def test_another_model_or_precision_has_another_fingerprint_and_other_settings_have_not(policy, tmp_path):
    known = fingerprint(ROWS, policy)
    assert fingerprint(ROWS, replace(policy, logprob_batch_size=1, seed=5)) == known
    assert fingerprint(ROWS, replace(policy, precision="bfloat16")) != known
    assert fingerprint(ROWS, replace(policy, hf_config_overrides={"rope_theta": 1})) != known
    assert fingerprint(ROWS, replace(policy, model_name="owner/name")) != known
    (tmp_path / "model").rename(tmp_path / "moved")
    moved = replace(policy, model_name=str(tmp_path / "moved"))
    (tmp_path / "moved" / "README.md").unlink()
    assert fingerprint(ROWS, moved) == known
    (tmp_path / "moved" / "model.safetensors").write_text("[]")  # as long, but written later
    assert fingerprint(ROWS, moved) != known


def test_what_was_written_is_read_for_the_same_fingerprint_alone(tmp_path, caplog):
    path = tmp_path / FILE_NAME
    assert ReferenceFile(path, "a").read() is None
    assert not caplog.records
    ReferenceFile(path, "a").write(SUMS)
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]
    found = ReferenceFile(path, "a").read()
    assert found is not None
    assert found.keys() == SUMS.keys()
    assert all(torch.equal(found[name], SUMS[name]) and found[name].dtype == torch.float64 for name in SUMS)
    assert ReferenceFile(path, "b").read() is None
    assert "is of other data or another model" in caplog.text
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the sign of a logprob is in the last byte
    path.write_bytes(content)
    assert ReferenceFile(path, "a").read() is None
    assert "has changed since it was written" in caplog.text


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone.* \(checkpointing\.checkpoint_dir\)"):
        ReferenceFile(tmp_path / "gone" / FILE_NAME, "a").write(SUMS)
