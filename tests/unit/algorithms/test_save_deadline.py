import pytest

from nemo_offload_rl.algorithms.checkpoints import SaveDeadline, seconds_of


def test_a_deadline_is_days_hours_minutes_and_seconds():
    assert seconds_of("00:03:45:00") == 3 * 3600 + 45 * 60
    assert seconds_of("1:0:0:9") == 86400 + 9
    assert seconds_of("03:45:00") is seconds_of("a:b:c:d") is seconds_of("0:0:0:-1") is seconds_of("") is None


def test_the_last_step_is_the_one_after_which_another_as_long_as_the_longest_would_end_too_late():
    now = [5.0]
    deadline = SaveDeadline("0:0:1:0", clock=lambda: now[0])
    now[0] = 100.0
    deadline.start()
    # After 30 s another step of 20 s ends before 60 s, after 40 s it does not.
    for duration_s, reached in ((10, False), (20, False), (10, True)):
        now[0] += duration_s
        deadline.step_done()
        assert deadline.reached is reached


@pytest.mark.parametrize(("save_s", "margin_s"), [(600, 0), (0, 600), (300, 300)])
def test_a_long_validation_a_save_and_the_margin_all_end_before_the_deadline(save_s, margin_s):
    """Steps of 60 s, every 20th with a validation of 20 minutes and then saved, within two hours."""
    now = 0.0
    deadline = SaveDeadline("0:2:0:0", margin_s, clock=lambda: now)
    deadline.start()
    step = 0
    while not deadline.reached:
        step += 1
        now += 60 + (1200 if step % 20 == 0 else 0)
        deadline.step_done()
        if step % 20 == 0 or deadline.reached:
            for waited_s in (save_s / 3, save_s * 2 / 3):  # for its beginning, and for its end
                with deadline.saving():
                    now += waited_s
            deadline.save_ended()
    longest_step_s = 1260
    # In time, and no earlier than a step like the longest needs.
    assert 7200 - longest_step_s - 60 <= now + margin_s <= 7200


def test_a_save_in_the_background_takes_as_long_as_from_its_beginning_to_its_end():
    now = 0.0
    deadline = SaveDeadline("0:0:1:0", clock=lambda: now)
    with deadline.saving():
        now += 1
    now += 10  # a step meanwhile
    deadline.step_done()
    assert not deadline.reached
    with deadline.saving():
        now += 1
    deadline.save_ended()
    now += 10
    deadline.step_done()
    assert not deadline.reached  # 22 + 10 + 12 of 60 s
    now += 10
    deadline.step_done()
    assert not deadline.reached  # 32 + 10 + 12
    now += 10
    deadline.step_done()
    assert deadline.reached


def test_without_a_deadline_no_step_is_the_last():
    deadline = SaveDeadline(None, clock=iter([0.0, 0.0, 1e9]).__next__)
    deadline.start()
    deadline.step_done()
    assert not deadline.reached
