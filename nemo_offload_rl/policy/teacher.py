"""A frozen model beside the policy in its worker: what its distributions are read from.

It has a group of its own in the residency plan, and is on the device in the phase TEACHER_INFERENCE only; its layers
may be groups of their own, which pass through the device one after the other in each pass. Where whole distributions
are compared, the rows of its output layer that belong to this rank's part of the policy's vocabulary are another group,
which training reads: its hidden states travel, H values a token, and its logits exist for one chunk of positions at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_offload_rl.backends.factory import build_teacher
from nemo_offload_rl.keys.worker import TeacherSettings
from nemo_offload_rl.protocols.backend import FrozenModel, PolicyBackend, ProcessInfo
from nemo_offload_rl.protocols.scoring import TeacherHead
from nemo_offload_rl.residency import TEACHER_HEAD, StateGroup, TensorGroup, aligned, unique_storages


class Teacher:
    """One rank's teacher.

    Args:
        settings: See `TeacherSettings`.
        process: This rank; process groups are there.
        student: The policy's backend, which reads the output layer where that is a group.
    """

    def __init__(self, settings: TeacherSettings, process: ProcessInfo, student: PolicyBackend) -> None:
        self.settings = settings
        self.model: FrozenModel = build_teacher(settings.model, process, streams_layers=settings.streams_layers)
        self._head: TeacherHead | None = None
        if settings.topk is None:
            self._head = self._head_for(student)
            student.use_teacher_head(self._head)

    def state_groups(self) -> Sequence[StateGroup]:
        """`teacher`, and `teacher_head` where training reads it."""
        head = self._head
        if head is None:
            return self.model.state_groups()
        return (*self.model.state_groups(), TensorGroup(TEACHER_HEAD, lambda: [("weight", head.weight)]))

    def expected_bytes(self) -> dict[str, int]:
        """Host bytes of each row of the plan that they are in."""
        sizes: dict[str, int] = {}
        for group in self.state_groups():
            storages = unique_storages(group.tensors()).values()
            row = group.name.partition(".")[0]
            sizes[row] = sizes.get(row, 0) + sum(aligned(record.storage.nbytes()) for record in storages)
        return sizes

    def close(self) -> None:
        """Give memory back."""
        self.model.close()

    def _head_for(self, student: PolicyBackend) -> TeacherHead:
        shard = student.vocab_shard
        num_parts = 1 if shard.group is None else shard.group.size()
        num_rows = student.vocab_size // num_parts
        with torch.no_grad():
            weight = self.model.output_rows(shard.start, num_rows)
        return TeacherHead(weight, self.model.temperature, self.model.softcap)
