import pytest

from nemo_offload_rl.data.records import Answer
from nemo_offload_rl.environments.interfaces import Response, Score, Unscored
from nemo_offload_rl.environments.math import ArithmeticEnvironment, MathEnvironment


@pytest.fixture(scope="module")
def environment():
    made = MathEnvironment(num_workers=1, timeout_s=300.0)
    yield made
    made.close()


def response(text: str, answer: Answer) -> Response:
    return Response(prompt_text="", text=text, truncated=False, reference_answer=answer, metadata={})


def test_answers_are_compared_as_mathematics(environment):
    cases = [
        ("so the answer is \\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        ("The final answer is 42.", "42", True),
        ("\\boxed{41}", "42", False),
        ("I do not know", "42", False),
        ("", "42", False),
        ("\\boxed{\\frac{}{", "42", False),
        ("\\boxed{0.5}", ["7", "\\frac{1}{2}"], True),
        ("\\boxed{0.5}", ["7", "8"], False),
    ]
    scores = environment.step([response(text, answer) for text, answer, _ in cases])
    assert [score.correct for score in scores] == [correct for _, _, correct in cases]
    assert [score.reward for score in scores] == [float(correct) for _, _, correct in cases]


def test_equal_answers_in_other_spellings_are_the_same(environment):
    equal = [("\\boxed{5}", "$x=5$"), ("$x=5$", "so it is 5."), ("\\boxed{1/2}", "\\boxed{0.5}"), ("$5\\%$", "0.05")]
    other = [("\\boxed{5}", "$x=6$"), ("\\boxed{1/2}", "\\boxed{0.51}"), ("5", "I do not know"), ("", "")]
    assert environment.same_answers([*equal, *other]) == [True] * 4 + [False] * 4


@pytest.mark.processes
def test_a_formula_that_sympy_never_finishes_costs_its_time_limit_and_has_no_score(caplog):
    impatient = MathEnvironment(num_workers=1, timeout_s=5.0)
    try:
        scores = impatient.step([response("\\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{8}}}"), response("\\boxed{2}", "2")])
    finally:
        impatient.close()
    assert scores == [Unscored("timed_out"), Score(1.0, True, answer="2")]
    assert "env.math: 1 of 2 scores took longer than 5 s" in caplog.text


@pytest.mark.parametrize("reference", ["5%", "5\\%", "5 \\%", "0.05"])
def test_a_percentage_equals_its_value_in_every_spelling(reference):
    environment = MathEnvironment(num_workers=0, timeout_s=1.0)
    said = [
        "\\boxed{5%}",
        "\\boxed{5\\%}",
        "\\boxed{0.05}",
        "It is $5\\%$.",
        "The answer is 5%.",
        "\\boxed{\\frac{1}{20}}",
    ]
    wrong = ["\\boxed{6\\%}", "\\boxed{50\\%}", "\\boxed{0.5}", "\\boxed{%}"]
    scores = environment.step([response(text, reference) for text in (*said, *wrong)])
    assert [score.correct for score in scores] == [True] * len(said) + [False] * len(wrong)


DAPO_CASES = [
    # What DAPO's own code (verl/utils/reward_score/math_dapo.py) says of these.
    ("so\nAnswer: 34", "34", True),
    ("Answer: 12\nno, answer :  $34$.", "34", True),
    ("Answer: x = 34", "34", True),
    ("Answer: 34 square km", "34", True),
    ("Answer: 1,034", "1034", True),
    ("Answer: \\boxed{\\frac12}", "\\frac{1}{2}", True),
    ("Answer: \\text{34 cents}", "34", True),
    ("Answer: 0.5", "\\frac{1}{2}", False),
    ("\\boxed{34}", "34", False),
    ("Answer: 34" + " so" * 100, "34", False),
    ("Answer:\n34", "34", True),
    ("", "34", False),
    ("Answer: 34", ["33", "34"], True),
]


@pytest.mark.parametrize(("text", "answer", "correct"), DAPO_CASES)
def test_the_rule_of_dapo_compares_the_text_after_the_last_answer(text, answer, correct):
    environment = MathEnvironment(num_workers=0, timeout_s=1.0, verifier="dapo_math_verify")
    (score,) = environment.step([response(text, answer)])
    assert (score.correct, score.reward) == (correct, float(correct))


def score(text: str, *, truncated: bool = False, answer: Answer = "95"):
    response = Response(prompt_text="37+58=", text=text, truncated=truncated, reference_answer=answer, metadata={})
    (result,) = ArithmeticEnvironment().step([response])
    return result.reward, result.correct


@pytest.mark.parametrize("text", ["95", " 95 ", "15,9=95", "1=2=95"])
def test_the_right_integer_alone_or_after_the_last_equals_sign_is_rewarded(text):
    assert score(text) == score(text, answer=["7", "95"]) == (1.0, True)


@pytest.mark.parametrize("text", ["", "=", "94", "095", "95.", "95=", "95=94", "it is 95"])
def test_anything_else_is_not_rewarded(text):
    assert score(text) == (0.0, False)


def test_negative_answers_keep_their_sign():
    assert score("3-5=-2", answer="-2") == (1.0, True)
    assert score("2", answer="-2") == (0.0, False)


def test_a_response_cut_at_the_limit_is_wrong_whatever_it_says():
    assert score("95", truncated=True) == (0.0, False)
