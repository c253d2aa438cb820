"""Choices of the commands of this folder. It does not import torch, so that `--help` is quick."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

SETTINGS = "settings.json"  # the file with the settings of the run in a folder of checkpoints
# What a resumed run may change: its losses are the same, up to rounding.
FREE = ("strategy", "context", "steps", "recompute", "save_every")


class Kind(StrEnum):
    """Weak: the tokens of a rank are constant. Strong: the tokens of the sequence are."""

    WEAK, STRONG = "weak", "strong"


class Way(StrEnum):
    """Implementations.

    Plan: GPUs exchange by copies, if they can. Limited: heads are exchanged in groups, with less
    memory. Captured: the same passes in a CUDA graph, so that the host launches them at once.
    All-to-all: the plan, with collectives of NCCL in place of copies.
    """

    PLAN, LIMITED, GATHER, RING = "plan", "plan with limited memory", "all-gather", "ring"
    COLLECTIVES = "plan with all-to-alls"
    CAPTURED = "captured plan with limited memory"


class Task(StrEnum):
    """The task of training.

    Copy: the second half of a sequence repeats the first half. Retrieval: pairs of key and value,
    and queries for some keys at the end. Text: bytes of a file.
    """

    COPY, RETRIEVAL, TEXT = "copy", "retrieval", "text"


class Precision(StrEnum):
    """The dtypes of training. Mixed: bfloat16, but float32 for parameters, angles and sums."""

    MIXED, SINGLE, DOUBLE = "mixed", "single", "double"


@dataclass(frozen=True)
class Settings:
    """The settings of a training run; see `train`.

    Raises:
        ValueError: The width or the heads cannot be divided.
    """

    task: Task = Task.COPY
    text: Path | None = None
    tokens: int = 4096
    pattern: str = "(local(256) | global_tokens(16) | strided(16)) & causal()"
    block_size: int = 128
    strategy: str = "auto"
    context: int = 1
    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    batch: int = 4
    steps: int = 100
    lr: float = 1e-3
    warm_up: int = 10
    recompute: bool = True
    precision: Precision = Precision.MIXED
    seed: int = 0
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of {2 * self.heads}, an even number of dims for each "
                f"of the {self.heads} heads, got {self.width}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide the {self.heads} heads, got {self.kv_heads}")

    def check_resumed(self, folder: Path) -> None:
        """Checks that a run in a folder has these settings.

        Raises:
            ValueError: Others are saved there, of which at least one changes the losses.
        """
        path = folder / SETTINGS
        if not path.exists():
            return
        saved, mine = json.loads(path.read_text()), self._facts
        if others := [name for name in mine if mine[name] != saved.get(name)]:
            differences = ", ".join(f"{n} {saved.get(n)!r}, not {mine[n]!r}" for n in others)
            raise ValueError(f"the run in {folder} has other settings: {differences}")

    def save(self, folder: Path) -> None:
        """Writes to a folder what `check_resumed` compares."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS).write_text(json.dumps(self._facts, indent=1) + "\n")

    @property
    def _facts(self) -> dict:
        """The settings that determine the losses, as values of JSON."""
        facts = {name: value for name, value in asdict(self).items() if name not in FREE}
        return json.loads(json.dumps(facts, default=str))

    def mesh(self, ranks: int) -> tuple[int, int]:
        """(number of rows of ranks, which read different sequences; number of ranks in a row)

        Raises:
            ValueError: The ranks or the sequences of a step cannot be divided in this way.
        """
        if ranks % self.context:
            raise ValueError(f"context must divide the {ranks} ranks, got {self.context}")
        rows = ranks // self.context
        if self.batch % rows:
            raise ValueError(
                f"batch must be a multiple of the {rows} rows of ranks, got {self.batch}"
            )
        return rows, self.context
