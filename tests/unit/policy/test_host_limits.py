from __future__ import annotations

import resource

import pytest
from cgroups import write_tree
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.memory.limits import (
    HostLimit,
    HostShare,
    HostShortage,
    judge_host_memory,
    read_host_limits,
    resident_bytes,
)
from nemo_offload_rl.residency import meminfo_bytes

MACHINE_BYTES = 1 << 40  # of the fake /proc


def v2(limit, used, cache=0):
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


def v1(limit, used, cache=0):
    stat = f"cache 1\ninactive_file 5\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def tightest(proc):
    limit = min(read_host_limits(proc), key=lambda limit: limit.left_bytes)
    return limit.left_bytes, limit.name


@pytest.mark.parametrize(("version", "files", "name"), [(2, v2, "memory.max"), (1, v1, "memory.limit_in_bytes")])
def test_every_cgroup_from_the_process_s_own_to_the_root_counts(tmp_path, version, files, name):
    no_limit = "max" if version == 2 else 9223372036854771712
    cases = {
        "own": ({"/": files(no_limit, 9), "/a": files(no_limit, 8), "/a/b": files(1000, 400)}, 600, "a/b"),
        "above": ({"/": files(no_limit, 9), "/a": files(900, 500), "/a/b": files(1000, 400)}, 400, "a"),
        "root": ({"/": files(700, 500), "/a": files(900, 500), "/a/b": files(no_limit, 400)}, 200, ""),
        "cache": ({"/": files(no_limit, 9), "/a": files(no_limit, 8), "/a/b": files(1000, 900, 300)}, 400, "a/b"),
        "over": ({"/": files(no_limit, 9), "/a/b": files(1000, 1200)}, 0, "a/b"),
    }
    for case, (folders, left, where) in cases.items():
        proc = write_tree(tmp_path / case, folders, "/a/b", version)
        assert tightest(proc) == (left, str(tmp_path / case / "cgroup" / where / name))
    proc = write_tree(tmp_path / "free", {"/": files(no_limit, 9), "/a": files(no_limit, 9)}, "/a", version)
    assert tightest(proc) == (MACHINE_BYTES, "MemAvailable")


def test_a_soft_limit_that_would_stall_the_process_counts_too(tmp_path):
    proc = write_tree(tmp_path, {"/a": {**v2("max", 100), "memory.high": "500\n"}}, "/a")
    assert tightest(proc) == (400, str(tmp_path / "cgroup" / "a" / "memory.high"))


def test_a_mount_that_begins_below_the_root_shows_its_own_part(tmp_path):
    proc = write_tree(tmp_path, {"/": v2(1000, 100), "/b": v2(500, 100)}, "/docker/x/b")
    mountinfo = proc / "self" / "mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace(" / ", " /docker/x ", 1))
    assert tightest(proc) == (400, str(tmp_path / "cgroup" / "b" / "memory.max"))
    (proc / "self" / "cgroup").write_text("0::/elsewhere\n")  # seen from another namespace
    assert tightest(proc) == (900, str(tmp_path / "cgroup" / "memory.max"))


def test_limits_of_the_process_alone_count(tmp_path, monkeypatch):
    proc = write_tree(tmp_path, {}, "/")
    (proc / "self" / "status").write_text("Name:\tx\nVmSize:\t   10 kB\nVmData:\t   4 kB\n")
    soft = {resource.RLIMIT_AS: 20480, resource.RLIMIT_DATA: 8192}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft[kind], soft[kind]))
    found = {limit.name.split()[0]: limit.left_bytes for limit in read_host_limits(proc)}
    assert found == {"MemAvailable": MACHINE_BYTES, "RLIMIT_AS": 10240, "RLIMIT_DATA": 4096}
    soft[resource.RLIMIT_AS] = resource.RLIM_INFINITY
    assert "RLIMIT_AS (ulimit -v)" not in {limit.name for limit in read_host_limits(proc)}


def test_two_processes_in_one_cgroup_share_its_limit_under_whatever_path_they_see_it(tmp_path):
    proc = write_tree(tmp_path, {"/a": v2(1000, 0)}, "/a")
    (tmp_path / "other").symlink_to(tmp_path / "cgroup")
    outside = read_host_limits(proc)
    mountinfo = proc / "self" / "mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace("/cgroup ", "/other "))
    inside = read_host_limits(proc)
    assert [limit.scope for limit in outside] == [limit.scope for limit in inside]
    assert isinstance(judge_host_memory([(outside, {"x": 500}), (inside, {"x": 500})], 0), HostShare)
    verdict = judge_host_memory([(outside, {"x": 500}), (inside, {"x": 501})], 0)
    assert isinstance(verdict, HostShortage)
    assert (verdict.num_ranks, verdict.needed_bytes, verdict.limit.left_bytes) == (2, 1001, 1000)


HOSTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # host
        st.integers(0, 200),  # what the rank needs
        st.integers(0, 400),  # what it has read as left on its host
        st.none() | st.integers(0, 200),  # of a limit of its own
    ),
    min_size=1,
    max_size=6,
)


@given(HOSTS)
def test_ranks_get_all_that_they_need_or_all_hear_of_the_same_limit(ranks):
    asked = []
    for index, (host, need, left, own) in enumerate(ranks):
        limits = [HostLimit(f"host {host}", "MemAvailable", left)]
        if own is not None:
            limits.append(HostLimit(f"rank {index}", "memory.max", own))
        asked.append((limits, {"state": need}))
    verdicts = [judge_host_memory(asked, rank) for rank in range(len(ranks))]
    # By plain sums.
    left_on = {host: min(left for h, _, left, _ in ranks if h == host) for host, *_ in ranks}
    need_on = {host: sum(need for h, need, _, _ in ranks if h == host) for host in left_on}
    fits = all(need_on[host] <= left_on[host] for host in left_on)
    fits = fits and all(own is None or need <= own for _, need, _, own in ranks)
    assert {isinstance(verdict, HostShare) for verdict in verdicts} == {fits}
    if fits:
        for host in left_on:
            shares = [v.num_bytes for v, rank in zip(verdicts, ranks, strict=True) if rank[0] == host]
            assert sum(shares) <= left_on[host]
        for (_, need, _, own), verdict in zip(ranks, verdicts, strict=True):
            assert need <= verdict.num_bytes <= (verdict.num_bytes if own is None else own)
    else:
        assert all(verdict == verdicts[0] for verdict in verdicts)
        assert verdicts[0].needed_bytes > verdicts[0].limit.left_bytes


def test_resident_size_grows_with_touched_memory():
    before = resident_bytes()
    block = bytearray(b"x" * (256 << 20))
    assert resident_bytes() - before > 128 << 20  # the system may take some of what is idle meanwhile
    assert len(block) == 256 << 20
    assert meminfo_bytes("MemAvailable") > 0


def test_this_process_s_limits_can_be_read():
    limits = read_host_limits()
    assert limits[0].name == "MemAvailable"
    assert all(limit.left_bytes >= 0 for limit in limits)
    assert len({limit.scope for limit in limits}) == len(limits)
