from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from toy_training import settings

from nemo_offload_rl.memory.host_plan import choose_resident
from nemo_offload_rl.residency import BASE, PHASES, TEACHER_HEAD, Phase, PhaseSpec, Placement, resolve_plan
from nemo_offload_rl.residency.table.plan import TEACHER, TEACHER_LAYER

D, H, F, U = Placement.DEVICE, Placement.HOST, Placement.FREED, Placement.UNCHANGED

#                                         TRAINING OPTIM_STEP LP_INFERENCE REFIT GENERATION TEACHER_INFERENCE
EXPECTED = {
    "default": ({}, {"params": [D, D, D, D, H, U], "grads": [D, D, F, F, F, F], "optimizer": [D, D, U, H, H, U]}),
    "logprob": ({"offload_optimizer_states_for_logprob": True}, {"optimizer": [D, D, H, H, H, H]}),
    "stream": (
        {"offload_optimizer_states": True},
        {
            "optimizer": [D, D, U, H, H, U],
            "optimizer/part.0": [H, U, H, H, H, H],
            "optimizer/part.7": [H, U, H, H, H, H],
        },
    ),
    "cpu": ({"optimizer_cpu_offload": True}, {"optimizer": [H, H, H, H, H, H]}),
    "apart": (
        {"colocated": False},
        {"params": [D, D, D, U, U, U], "grads": [D, D, F, U, U, F], "optimizer": [D, D, U, U, U, U]},
    ),
    "teacher": (
        {"rows": frozenset({TEACHER, TEACHER_HEAD, TEACHER_LAYER})},
        {
            "teacher": [H, H, H, H, H, D],
            "teacher/layer.3": [H, H, H, H, H, H],
            "teacher_head": [D, U, H, H, H, U],
        },
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_each_key_changes_the_rows_that_the_documentation_says(case):
    changes, rows = EXPECTED[case]
    plan = resolve_plan(settings(**changes))
    for group, row in rows.items():
        assert [plan.placement(group, phase) for phase in Phase] == row


def test_cpu_optimizer_and_streamed_states_exclude_each_other():
    with pytest.raises(ValueError, match="Set one of them to false"):
        resolve_plan(settings(optimizer_cpu_offload=True, offload_optimizer_states=True))


def test_the_plan_cannot_be_changed_after_it_was_resolved():
    plan = resolve_plan(settings())
    with pytest.raises(TypeError):
        plan.table["params"] = {}
    with pytest.raises(TypeError):
        plan.table["params"][Phase.REFIT] = Placement.HOST


def test_the_printed_table_has_every_group_phase_and_size():
    text = resolve_plan(settings()).render({"params": 2 * 2**30})
    lines = text.splitlines()
    phases = [phase.name for phase in Phase if phase is not Phase.TEACHER_INFERENCE]
    assert lines[0].split() == ["group", *phases]
    with_teacher = resolve_plan(settings(rows=frozenset({TEACHER}))).render().splitlines()
    assert with_teacher[0].split() == ["group", *(phase.name for phase in Phase)]
    assert lines[1].startswith("params (2.00 GiB)")
    assert [line.split()[0] for line in lines[1:]] == ["params", "grads", "optimizer", "reference"]


def test_only_the_optimizers_host_copy_depends_on_the_pinning_key():
    assert "optimizer" in resolve_plan(settings()).pinned_groups
    assert resolve_plan(settings(use_pinned_optimizer_offload=False)).pinned_groups == {"params", "reference"}


def test_the_largest_groups_stay_as_far_as_the_room_goes():
    sizes = {"params": 6, "optimizer": 12}
    assert choose_resident(sizes, 18) == {"params", "optimizer"}
    assert choose_resident(sizes, 17) == {"optimizer"}
    assert choose_resident(sizes, 11) == {"params"}
    assert choose_resident(sizes, 5) == set()


def test_a_resident_group_stays_for_refit_and_generation_and_the_others_leave():
    plan = resolve_plan(settings(resident_groups=frozenset({"optimizer"})))
    assert plan.placement("optimizer", Phase.GENERATION) is U
    assert plan.placement("optimizer", Phase.REFIT) is U
    assert plan.placement("params", Phase.GENERATION) is H


def test_the_estimate_of_a_phase_counts_what_the_plan_brings_or_leaves_there():
    sizes = {"params": 1, "grads": 2, "optimizer": 4, "optimizer/part.0": 8}
    plan = resolve_plan(settings(offload_optimizer_states=True, resident_groups=frozenset({"optimizer"})))
    #                                              TRAINING OPTIM_STEP LP_INFERENCE REFIT GENERATION TEACHER_INFERENCE
    assert [plan.device_bytes(sizes, phase) for phase in Phase] == [7, 15, 5, 5, 4, 5]


def test_cached_memory_is_released_for_an_engine_on_the_same_device_only():
    for colocated, expected in ((True, {Phase.REFIT, Phase.GENERATION}), (False, set())):
        plan = resolve_plan(settings(colocated=colocated))
        assert {phase for phase in Phase if plan.releases_cache(phase)} == expected


@pytest.mark.parametrize("phase", Phase)
def test_what_a_phase_touches_is_on_its_device(phase):
    plan = resolve_plan(settings(rows=frozenset({BASE, TEACHER, TEACHER_HEAD})))
    assert all(plan.placement(group, phase) is D for group in PHASES[phase].touches)


def documented_rows() -> dict[str, list[str]]:
    """The six cells of each row of the document's two tables of phases, by the first word of the row."""
    text = (Path(__file__).parents[3] / "docs/design/residency.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {re.findall(r"\w+", row[0])[0]: row[1:] for row in cells if len(row) == 1 + len(Phase) and row[0]}


def test_the_document_has_the_placements_of_the_default_plan():
    plan, rows = resolve_plan(settings()), documented_rows()
    for group in plan.table:
        expected = ["unchanged" if place is U else place.name for place in plan.table[group].values()]
        assert [cell.split(",")[0] for cell in rows[group]] == expected


@pytest.mark.parametrize("name", [field.name for field in fields(PhaseSpec)])
def test_the_document_has_what_each_phase_does(name):
    shown = {True: "yes", False: "", None: ""}
    for phase, cell in zip(Phase, documented_rows()[name], strict=True):
        value = getattr(PHASES[phase], name)
        if name == "touches":
            assert set(cell.split(", ")) - {""} == value - {BASE, TEACHER_HEAD}
        else:
            assert cell == (value.name if isinstance(value, Phase) else shown[value])
