import pytest

from nemo_offload_rl.data.arithmetic import is_held_out, load_arithmetic, solve
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import ArithmeticConfig


def settings(**changes) -> ArithmeticConfig:
    values = {"num_digits": 2, "operators": ("+",), "size": 4000, "holdout": 512, "seed": 1}
    return ArithmeticConfig(dataset_name="arithmetic", **(values | changes))


def problems(rows) -> set:
    return {(row.metadata["operands"][0], row.metadata["operator"], row.metadata["operands"][1]) for row in rows}


def test_the_same_seed_gives_the_same_rows_and_another_seed_gives_others():
    assert load_arithmetic(settings()) == load_arithmetic(settings())
    assert load_arithmetic(settings()) != load_arithmetic(settings(seed=2))


@pytest.mark.parametrize("num_digits", [2, 4])
def test_no_held_out_problem_nor_its_mirror_image_is_in_the_training_rows_of_any_seed(num_digits):
    held_out = problems(load_arithmetic(settings(num_digits=num_digits, operators=("+", "*"))).validation)
    mirrored = {(right, operator, left) for left, operator, right in held_out}
    for seed in (1, 2, 3):
        drawn = load_arithmetic(settings(num_digits=num_digits, operators=("+", "*"), seed=seed, size=8000))
        assert not problems(drawn.train) & (held_out | mirrored)


def test_all_rows_are_distinct_and_as_many_as_asked_for():
    drawn = load_arithmetic(settings())
    assert len(problems(drawn.train)) == len(drawn.train) == 4000
    assert len(problems(drawn.validation)) == len(drawn.validation) == 512


def test_about_one_problem_in_eight_is_held_out_and_mirror_images_agree():
    sides = [is_held_out((a, "+", b)) for a in range(100) for b in range(100)]
    assert 0.09 < sum(sides) / len(sides) < 0.16
    assert all(is_held_out((a, "*", b)) == is_held_out((b, "*", a)) for a in range(30) for b in range(30))


def test_questions_and_answers_agree_with_python():
    rows = load_arithmetic(settings(operators=("+", "-", "*"))).train
    for row in rows[:200]:
        assert eval(row.question.rstrip("=")) == int(row.answer)


def test_asking_for_more_problems_than_there_are_is_an_error_that_says_how_many_there_are():
    with pytest.raises(DataError, match=r"for size=10000: 2-digit operands with \+ give no more; lower size"):
        load_arithmetic(settings(size=10000))
    with pytest.raises(DataError, match="holdout=5000"):
        load_arithmetic(settings(holdout=5000))


def test_an_unknown_operator_is_named():
    with pytest.raises(DataError, match="'/' is unknown"):
        solve((4, "/", 2))
