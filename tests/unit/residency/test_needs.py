"""The device memory that a pass needs, as a function of its tokens and back."""

import sys

from nemo_offload_rl.residency import PassNeed


def test_the_largest_moment_of_a_pass_decides_and_the_most_tokens_are_its_inverse() -> None:
    kept = PassNeed(-1000, 10.0)  # before all gradients are there
    need = PassNeed(500, 2.0, other_moments=(kept, PassNeed(600, 0.0)))
    assert [need.num_bytes(tokens) for tokens in (0, 100, 1000)] == [600, 700, 9000]
    assert kept.num_bytes(50) == 0
    for num_bytes in (600, 700, 9000, 12345):
        tokens = need.most_tokens(num_bytes)
        assert need.num_bytes(tokens) <= num_bytes < need.num_bytes(tokens + 1)
    assert need.most_tokens(599) == 0
    assert PassNeed(5, 0.0).most_tokens(5) == sys.maxsize
    assert PassNeed(5, 0.0).most_tokens(4) == 0
