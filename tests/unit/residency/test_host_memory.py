from __future__ import annotations

from nemo_offload_rl.residency.host_memory import available_bytes, read_host_budget, resident_bytes


def test_the_tightest_of_machine_and_container_limit_is_the_budget(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    budget = read_host_budget(tmp_path)
    assert budget.num_bytes == 600000
    assert budget.limit_name.endswith("memory.max")


def test_a_container_without_a_limit_leaves_the_machines(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert read_host_budget(tmp_path).limit_name == "MemAvailable"


def test_version_one_control_groups_are_read_and_their_no_limit_value_is_none(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("100\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_host_budget(tmp_path).limit_name == "MemAvailable"
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    assert read_host_budget(tmp_path).num_bytes == 4900


def test_resident_size_grows_with_touched_memory():
    before = resident_bytes()
    block = bytearray(b"x" * (64 << 20))
    assert resident_bytes() - before > 48 << 20
    assert len(block) == 64 << 20
    assert available_bytes() > 0
