"""The same conversation has the same tokens as a prompt of GRPO, in SFT and in both responses of a DPO pair."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import EOS_TOKEN, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.data.encoding import ChatEncoder
from nemo_offload_rl.data.prompts import PromptEncoder, PromptTemplates
from nemo_offload_rl.data.records import Row
from nemo_offload_rl.keys.data_source import TaskKeys

BOS = "<s>"
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}" + EOS_TOKEN + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "pass-through": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "pass-through with a space": "{% for m in messages %}{{ m.content }} {% endfor %}",
    "pass-through that writes the begin": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "chatml": CHATML,
    "llama": "{{ bos_token }}" + CHATML,
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}" + EOS_TOKEN + "{% endif %}{% endfor %}"
    ),
    "marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + EOS_TOKEN + "{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + EOS_TOKEN + "{% endif %}"
    ),
}
CORPUS = ["the answer is the answer", " and  then the other one", "1+1=2 2+2=4", "\n\nthe\n\n the", "[/INST]the INST"]


@cache
def tokenizer(kind: str, bos: str) -> PreTrainedTokenizerFast:
    """Bytes alone, or with merges over words and spaces; with a begin token or without, written by itself or not."""
    if kind == "bytes":
        made = make_tokenizer()
    else:
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "merges")
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=[EOS_TOKEN, BOS])
        model.train_from_iterator(CORPUS * 5, trainer)
        made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=EOS_TOKEN)
    if bos != "none":
        made.add_special_tokens({"bos_token": BOS})
    if bos == "written by the tokenizer":
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, made.bos_token_id)]
        )
        assert made.encode("x")[0] == made.bos_token_id
    return made


TASK = TaskKeys(prompt_file=None, system_prompt_file=None, processor="sft_processor", env_name="e")
WORDS = st.lists(st.sampled_from(["the", "answer", " ", "\n", "1", "+", "é", "a"]), min_size=1, max_size=8).map("".join)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=40)
@example(kind="merges", bos="none", add_bos=False, question="\n\n", answers=("the", "the"))
@given(
    kind=st.sampled_from(["bytes", "merges", "merges over spaces"]),
    bos=st.sampled_from(["none", "has one", "written by the tokenizer"]),
    add_bos=st.booleans(),
    question=WORDS,
    answers=st.tuples(WORDS, WORDS),
)
def test_what_the_policy_reads_in_a_rollout_is_what_it_is_trained_on(template, kind, bos, add_bos, question, answers):
    made = tokenizer(kind, bos)
    made.chat_template = TEMPLATES[template]
    prompt = PromptEncoder(
        tokenizer=made,
        task=TASK,
        templates=PromptTemplates(prompt=None, system=None),
        data_set="d",
        add_bos=add_bos,
        chat_template_kwargs={},
    ).prompt(Row(question=question, answer="", origin="x"))
    encoder = ChatEncoder(tokenizer=made, chat_template_kwargs={}, add_bos=add_bos, add_eos=True, last_turn_only=False)
    user = {"role": "user", "content": question}
    for answer in answers:
        messages = [user, {"role": "assistant", "content": answer}]
        for num_given in (0, 1):  # SFT and DPO
            made_example = encoder.encode(messages, "x", num_given=num_given)
            assert tuple(made_example.token_ids[: len(prompt.token_ids)].tolist()) == prompt.token_ids
            assert made_example.token_mask.tolist().index(True) == len(prompt.token_ids)
    assert prompt.text == made.decode(prompt.token_ids)
    begins = prompt.token_ids[:2].count(made.bos_token_id) if bos != "none" else 0
    writes = "bos_token" in TEMPLATES[template]
    assert begins == (bos != "none" and (add_bos or writes)), "once, and where it is wanted"
