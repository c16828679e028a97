"""A frozen teacher model in the policy's worker.

The teacher is a separate group in the residency plan and is on the device in the phase TEACHER_INFERENCE only. Its
layers may be groups too, which pass through the device one by one in each pass. If whole distributions are compared,
training needs the teacher's output layer: the rows for this rank's part of the policy's vocabulary are another group.
The teacher then returns hidden states, H values a token, and training computes its logits in chunks of positions.
"""

from collections.abc import Sequence

import torch

from nemo_offload_rl.backends.factory import build_teacher
from nemo_offload_rl.keys.worker import TeacherSettings
from nemo_offload_rl.protocols.backend import FrozenModel, PolicyBackend, ProcessInfo
from nemo_offload_rl.protocols.scoring import TeacherHead
from nemo_offload_rl.residency import TEACHER_HEAD, StateGroup, aligned, row_of, unique_storages


class Teacher:
    """One rank's teacher.

    Args:
        settings: See `TeacherSettings`.
        process: This rank; its process groups exist already.
        student: The policy's backend, which may read the teacher's output layer.
    """

    def __init__(self, settings: TeacherSettings, process: ProcessInfo, student: PolicyBackend) -> None:
        self.settings = settings
        self.model: FrozenModel = build_teacher(settings.model, process, streams_layers=settings.streams_layers)
        self._head: TeacherHead | None = None
        if settings.topk is None:
            self._head = self._head_for(student)
            student.use_teacher_head(self._head)

    def state_groups(self) -> Sequence[StateGroup]:
        """Return the model's groups, and `teacher_head` if training reads the output layer."""
        head = self._head
        if head is None:
            return self.model.state_groups()
        return (*self.model.state_groups(), StateGroup(TEACHER_HEAD, lambda: [("weight", head.weight)]))

    def expected_bytes(self) -> dict[str, int]:
        """Return the host bytes of the teacher's groups, by row of the plan."""
        sizes: dict[str, int] = {}
        for group in self.state_groups():
            storages = unique_storages(group.tensors()).values()
            row = row_of(group.name)
            sizes[row] = sizes.get(row, 0) + sum(aligned(record.storage.nbytes()) for record in storages)
        return sizes

    def close(self) -> None:
        """Free the model's memory."""
        self.model.close()

    def _head_for(self, student: PolicyBackend) -> TeacherHead:
        shard = student.vocab_shard
        num_parts = 1 if shard.group is None else shard.group.size()
        num_rows = student.vocab_size // num_parts
        with torch.no_grad():
            weight = self.model.output_rows(shard.start, num_rows)
        return TeacherHead(weight, self.model.temperature, self.model.softcap)
