"""What the commands of this folder choose from; it imports no torch, so that help is quick."""

from enum import StrEnum


class Kind(StrEnum):
    """Weak: the tokens of a rank stay. Strong: those of the sequence stay."""

    WEAK, STRONG = "weak", "strong"


class Way(StrEnum):
    """Implementations."""

    PLAN, GATHER, RING = "plan", "all-gather", "ring"


class Task(StrEnum):
    """Copy: the second half of a sequence is the first. Retrieval: pairs of key and value, of
    which some keys are asked for at the end. Text: bytes of a file."""

    COPY, RETRIEVAL, TEXT = "copy", "retrieval", "text"
