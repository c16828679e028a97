"""What a function that takes several keys over is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_offload_rl.migrate.draft import Draft


@dataclass(frozen=True)
class Conversion:
    """A function for several keys.

    Attributes:
        keys: Patterns of NeMo-RL's keys that it reads and accounts for.
        theirs: What they mean there.
        ours: What is done here.
        apply: Takes them over.
        algorithms: That have the keys.
        reads: Keys that rules account for and it looks at too.
    """

    keys: tuple[str, ...]
    theirs: str
    ours: str
    apply: Callable[[Draft], None]
    algorithms: tuple[str, ...] = ("grpo", "sft", "dpo", "distillation")
    reads: tuple[str, ...] = ()

    def guide_row(self) -> str:
        """The row of docs/guides/from-nemo-rl.md."""
        keys = ", ".join(f"`{key}`" for key in dict.fromkeys(k.removesuffix(".*") for k in self.keys or self.reads))
        return f"| {keys} | {self.theirs} | {self.ours} |"
