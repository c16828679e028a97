"""Bad input of SFT and DPO ends in one line, before Ray starts, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from forked import Script
from supervised_cases import DPO_DATA, SFT_DATA, common, dpo, sft, write_model, write_rows
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM

from nemo_offload_rl.errors import UserError

ROOT = Path(__file__).parents[2]
CHAT_DATA = (
    "+data.train={{dataset_name: OpenAIFormatDataset, chat_key: messages, split_validation_size: 0.1, seed: 1, "
    "path: {folder}/{file}}}"
)

# name -> algorithm, overrides in place of the data set's, and words of the line
CASES = {
    "missing file": (sft, [SFT_DATA.replace("rows.jsonl", "none.jsonl")], ["none.jsonl", "No such file"]),
    "empty file": (sft, [SFT_DATA.replace("rows.jsonl", "empty.jsonl")], ["empty.jsonl has no rows"]),
    "not JSON": (sft, [SFT_DATA.replace("rows.jsonl", "broken.jsonl")], ["broken.jsonl:2 is not JSON"]),
    "cut Parquet file": (sft, [SFT_DATA.replace("rows.jsonl", "cut.parquet")], ["cut.parquet cannot be read"]),
    "row without the field": (sft, [SFT_DATA.replace("output_key: c", "output_key: x")], ["rows.jsonl:1", "'x'"]),
    "messages that are text": (sft, [CHAT_DATA.replace("{file}", "text.jsonl")], ["text.jsonl:1", "is a str"]),
    "nothing of the assistant": (sft, [CHAT_DATA.replace("{file}", "user.jsonl")], ["user.jsonl:1", "assistant's"]),
    "template that fails": (
        sft, [SFT_DATA, "policy.tokenizer.chat_template=\"{{{{ raise_exception('no') }}}}\""], ["rows.jsonl:", "no"]
    ),
    "template that changes its mind": (
        sft,
        [SFT_DATA, "policy.tokenizer.chat_template=\"{{{{ messages | length }}}}\""],
        ["rows.jsonl:", "assistant's part cannot be found"],
    ),
    "no chat template": (sft, [SFT_DATA, "policy.tokenizer.name={folder}/bare"], ["bare has no chat template"]),
    "row too long": (sft, [SFT_DATA, "data.max_input_seq_length=8"], ["rows.jsonl:", "8", "overlong_rows=drop"]),
    "a vocabulary without the padding token": (
        sft, [SFT_DATA, "+policy.hf_config_overrides.vocab_size=20"], ["no model can be built", "hf_config_overrides"]
    ),
    "tokens without an embedding": (
        sft, [SFT_DATA, "policy.model_name={folder}/few"], ["embeddings for 20 tokens", "resize_token_embed"]
    ),
    "pair of tokens without an embedding": (
        dpo, [DPO_DATA, "policy.model_name={folder}/few"], ["the tokenizer makes token 257 ('<|im_end|>')"]
    ),
    "fewer rows than a batch": (
        sft, [SFT_DATA, "policy.train_global_batch_size=64"], ["one batch needs 64", "lower policy.train_global_batch_"]
    ),
    "missing model": (sft, [SFT_DATA, "policy.model_name={folder}/none"], ["policy.model_name", "is not a folder"]),
    "checkpoints for a model": (
        sft, [SFT_DATA, "policy.model_name={folder}/older"], ["has no config.json; set it to", "older/step_10/hf"]
    ),
    "pair without the worse response": (
        dpo, [DPO_DATA.replace("rejected_key: r", "rejected_key: x")], ["rows.jsonl:1", "'x'", "rejected_key"]
    ),
    "pair of equal responses": (
        dpo, [DPO_DATA.replace("rejected_key: r", "rejected_key: c")], ["rows.jsonl:1", "are the same"]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    (folder / "empty.jsonl").touch()
    for step in (9, 10):
        (folder / f"older/step_{step}/hf").mkdir(parents=True)
        (folder / f"older/step_{step}/hf/config.json").touch()
    (folder / "broken.jsonl").write_text('{"p": "a", "c": "b"}\n{"p": "a", "c"\n')
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    (folder / "text.jsonl").write_text('{"messages": "hello"}\n')
    (folder / "user.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    for name in ("bare", "few"):
        shutil.copytree(folder / "model", folder / name)
    few = AutoModelForCausalLM.from_pretrained(folder / "few")
    few.config.pad_token_id = None
    few.resize_token_embeddings(20)
    few.save_pretrained(folder / "few")
    bare = make_tokenizer()
    bare.chat_template = None
    (folder / "bare" / "chat_template.jinja").unlink()
    bare.save_pretrained(folder / "bare")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_nothing_is_written(folder, name):
    run, overrides, words = CASES[name]
    filled = [text.replace("{file}", "").format(folder=folder) for text in overrides]
    model = [f"policy.tokenizer.name={folder / 'model'}"] if name.endswith("model") else []
    with pytest.raises(UserError) as error:
        run(folder, "run", *model, "~data.train", *filled)
    line = str(error.value)
    assert "\n" not in line
    assert all(word in line for word in words), line
    assert not (folder / "run").exists()


def test_the_launch_scripts_end_with_status_2_and_the_line_alone(folder, tmp_path):
    def words(algorithm: str) -> list[str]:
        data = (SFT_DATA if algorithm == "sft" else DPO_DATA).replace("rows.jsonl", "empty.jsonl")
        keys = [*common(folder, "script"), "~data.train", data.format(folder=folder)]
        return [f"examples/run_{algorithm}.py", *keys]

    for algorithm in ("sft", "dpo"):
        (output := tmp_path / algorithm).mkdir()
        done = Script(words(algorithm), output, cwd=ROOT, env=os.environ).wait(1500)
        assert done.status == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert "empty.jsonl has no rows" in line
        assert done.stdout == "reading tokenizer and data\n"
    assert not (folder / "script").exists()
