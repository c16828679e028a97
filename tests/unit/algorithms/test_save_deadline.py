from nemo_offload_rl.algorithms.save_deadline import SaveDeadline, seconds_of


def test_a_deadline_is_days_hours_minutes_and_seconds():
    assert seconds_of("00:03:45:00") == 3 * 3600 + 45 * 60
    assert seconds_of("1:0:0:9") == 86400 + 9
    assert seconds_of("03:45:00") is seconds_of("a:b:c:d") is seconds_of("0:0:0:-1") is seconds_of("") is None


def test_the_last_step_is_the_one_after_which_another_of_mean_length_would_end_too_late():
    now = [5.0]
    deadline = SaveDeadline("0:0:1:0", clock=lambda: now[0])
    now[0] = 100.0
    deadline.start()
    # After 40 s another step of 13.3 s ends before 60 s, after 50 s one of 12.5 s does not.
    for duration_s, reached in ((10, False), (20, False), (10, False), (10, True)):
        now[0] += duration_s
        deadline.step_done()
        assert deadline.reached is reached


def test_without_a_deadline_no_step_is_the_last():
    deadline = SaveDeadline(None, clock=iter([0.0, 0.0, 1e9]).__next__)
    deadline.start()
    deadline.step_done()
    assert not deadline.reached
