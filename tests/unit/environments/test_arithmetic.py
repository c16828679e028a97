import pytest

from nemo_offload_rl.environments.arithmetic import ArithmeticEnvironment
from nemo_offload_rl.environments.interfaces import Response


def score(text: str, *, truncated: bool = False, answer: str = "95"):
    response = Response(prompt_text="37+58=", text=text, truncated=truncated, reference_answer=answer, metadata={})
    (result,) = ArithmeticEnvironment().step([response])
    return result.reward, result.correct


@pytest.mark.parametrize("text", ["95", " 95 ", "15,9=95", "1=2=95"])
def test_the_right_integer_alone_or_after_the_last_equals_sign_is_rewarded(text):
    assert score(text) == (1.0, True)


@pytest.mark.parametrize("text", ["", "=", "94", "095", "95.", "95=", "95=94", "it is 95"])
def test_anything_else_is_not_rewarded(text):
    assert score(text) == (0.0, False)


def test_negative_answers_keep_their_sign():
    assert score("3-5=-2", answer="-2") == (1.0, True)
    assert score("2", answer="-2") == (0.0, False)


def test_a_response_cut_at_the_limit_is_wrong_whatever_it_says():
    assert score("95", truncated=True) == (0.0, False)
