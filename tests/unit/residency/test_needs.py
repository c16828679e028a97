"""The device memory that a pass needs, as a function of its tokens."""

from nemo_offload_rl.residency import PassNeed


def test_the_largest_moment_of_a_pass_decides_and_none_needs_less_than_nothing() -> None:
    kept = PassNeed(-1000, 10.0)  # before all gradients are there
    need = PassNeed(500, 2.0, other_moments=(kept, PassNeed(600, 0.0)))
    assert [need.num_bytes(tokens) for tokens in (0, 100, 1000)] == [600, 700, 9000]
    assert kept.num_bytes(50) == 0
