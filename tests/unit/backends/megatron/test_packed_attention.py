"""What deterministic attention of packed rows takes on a Hopper GPU, by calculation; a GPU is not asked."""

from dataclasses import replace

import pytest
from policy_cases import make_settings

from nemo_offload_rl.backends.megatron.upstream.packed_attention import (
    HOPPER,
    AttentionNeed,
    attention_need,
    is_affected,
    refusal,
    warning,
)

GIB = 2**30
HEADS = 16  # of the 0.6 B shape


def packed_settings(tmp_path, pack_tokens, longest, **changes):
    settings = make_settings(tmp_path, backend="megatron", precision="bfloat16", bf16=True, pipeline_dtype="bfloat16")
    packing = replace(settings.sequence_packing, enabled=True, train_mb_tokens=pack_tokens)
    changes = {"deterministic": True, "max_total_sequence_length": longest, **changes}
    return replace(settings, sequence_packing=packing, **changes)


@pytest.mark.parametrize(
    ("pack_tokens", "longest", "devices", "expected"),
    [
        # Observed by Transformer Engine's authors: 128 bytes for each score of 2 rows, four times as much of 4.
        (2 * 2048, 2048, 1, AttentionNeed(True, 128 * HEADS * 2 * 2048**2)),
        (4 * 2048, 2048, 1, AttentionNeed(True, 4 * 128 * HEADS * 2 * 2048**2)),
        # Whatever the rows are, the pack counts; each device has its part of it.
        (16384, 1024, 1, AttentionNeed(True, 256 * GIB)),
        (16384, 512, 1, AttentionNeed(True, 256 * GIB)),
        (16384, 256, 1, AttentionNeed(True, 512 * GIB)),
        (16384, 1024, 2, AttentionNeed(True, 64 * GIB)),
        (4096, 1024, 1, AttentionNeed(True, 16 * GIB)),
        (4096, 1024, 2, AttentionNeed(True, 4 * GIB)),
        (3000, 1024, 1, AttentionNeed(True, 16 * GIB)),
        # Too many scores for cuDNN's kernel.
        (8192, 8192, 1, AttentionNeed(False, 2 * GIB)),
        (8192, 5000, 1, AttentionNeed(False, 2 * GIB)),
        (32768, 16384, 1, AttentionNeed(False, 16 * GIB)),
        (32768, 16384, 2, AttentionNeed(False, None)),
        (16384, 32768, 2, AttentionNeed(False, None)),
    ],
)
def test_what_a_full_pack_needs(pack_tokens, longest, devices, expected):
    assert attention_need(HEADS, pack_tokens, longest, devices) == expected


def test_only_deterministic_packs_in_16_bits_on_hopper_are_affected(tmp_path):
    settings = packed_settings(tmp_path, 4096, 1024)
    padded = replace(settings, sequence_packing=replace(settings.sequence_packing, enabled=False))
    assert is_affected(settings, HOPPER)
    assert not is_affected(settings, (8, 0))
    assert not is_affected(settings, (10, 0))
    assert not is_affected(replace(settings, deterministic=False), HOPPER)
    assert not is_affected(replace(settings, precision="float32"), HOPPER)
    assert not is_affected(padded, HOPPER)


def test_packs_without_attention_are_refused(tmp_path):
    settings = packed_settings(tmp_path, 32768, 16384)
    message = refusal(AttentionNeed(False, None), settings)
    assert message is not None and "\n" not in message
    for word in (
        "policy.deterministic=false",
        "packs of 32768 tokens",
        "rows of up to 16384",
        "no deterministic attention",
    ):
        assert word in message
    assert refusal(AttentionNeed(True, 256 * GIB), settings) is None


def test_a_warning_has_the_gib_unless_they_are_few(tmp_path):
    settings = packed_settings(tmp_path, 4096, 1024)
    assert "takes about 16.0 GiB in each layer's backward pass" in str(warning(AttentionNeed(True, 16 * GIB), settings))
    assert "several copies of each layer's scores, about 2.0 GiB each" in str(
        warning(AttentionNeed(False, 2 * GIB), settings)
    )
    assert warning(AttentionNeed(True, GIB // 2), settings) is None
