"""What is checked of environments and data together before anything is asked."""

from __future__ import annotations

import pytest
from local_grpo import make_prompts

from nemo_offload_rl.data.records import Answer, Prompt, Splits
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import EnvConfig
from nemo_offload_rl.runs.environments import open_environments


def opened(
    name: str,
    *answers: Answer,
    data_set: str = "sums",
    other: tuple[Prompt, ...] = (),
    needs_answers: bool = True,
    **keys: str,
) -> None:
    made = make_prompts(answers, (data_set,))
    prompts = tuple(Prompt(**{**vars(prompt), "env_name": name}) for prompt in made)
    settings = {name: EnvConfig(num_workers=0, **keys)}
    splits = Splits(train=prompts[:1], validation=(*prompts[1:], *other))
    with open_environments(settings, {}, splits, needs_answers=needs_answers):
        pass


def test_answers_that_no_response_can_equal_are_counted_and_shown_by_data_set(caplog):
    opened("math", "42", "", " ", "\\frac{1}{2}", "5%", "yes", "3.0")
    told = [record.getMessage() for record in caplog.records if record.name.startswith("nemo_offload_rl")]
    assert told == [
        "data set sums: 2 of 7 answers for env.math are blank, so no response to these prompts can be right, such as ''"
    ]
    caplog.clear()
    opened("math", "Answer: 1\nAnswer: 2", "42.0", "5%", "7", math_verify_impl="dapo_math_verify")
    assert ["do not equal themselves" in caplog.messages[0], "'42.0'" in caplog.messages[1]] == [True, True]
    assert caplog.messages[1].startswith("data set sums: 2 of 4 answers for env.math are compared as text")
    caplog.clear()
    opened("arithmetic", "x=3", "7", " 8 ")
    assert len(caplog.messages) == 1 and "1 of 3 answers for env.arithmetic do not equal" in caplog.messages[0]
    caplog.clear()
    opened("arithmetic", ["x=3", "7"], ["x=3", "y=3"], ["", "8"])
    assert len(caplog.messages) == 1 and "1 of 3 answers for env.arithmetic do not equal" in caplog.messages[0]


@pytest.mark.parametrize(("name", "answers"), [("math", ("", " ")), ("arithmetic", ("a=1", ""))])
def test_a_data_set_of_which_no_answer_can_be_given_is_refused_though_another_one_has_answers(name, answers):
    other = (Prompt(token_ids=(1,), text="p", reference_answer="4", env_name=name, data_set="fine"),)
    with pytest.raises(DataError, match=r"data set sums: .* not one of 2 answers equals itself, .*\(output_key\)"):
        opened(name, *answers, other=other)


def test_distillation_can_do_without_answers_but_not_with_wrong_ones(caplog):
    opened("math", "", "", needs_answers=False)
    assert "2 of 2 answers for env.math are blank" in caplog.text
    with pytest.raises(DataError, match="not one of 2 answers equals itself"):
        opened("arithmetic", "", "a=1", needs_answers=False)
