"""Sequences whose tokens depend on tokens far away: a copy, a retrieval, or the bytes of a text.

A sample depends only on the seed and its number, so a resumed run reads the samples that it would
have read. Labels are the next tokens, or IGNORED where the loss does not count.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.long_context.choices import Task

IGNORED = -100
VOCABULARY = 256
QUERY = VOCABULARY - 1  # the token before a queried key
SYMBOLS = VOCABULARY - 1
ASKED = 8  # number of queried keys of a retrieval
EVERY = 16  # one of so many tokens of a retrieval starts a pair of key and value


@dataclass(frozen=True)
class Corpus:
    """Samples of `length` tokens; `text` has the bytes of a file, more than a sample."""

    task: Task
    length: int
    seed: int
    text: Tensor | None = None

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), int64 (length,) each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        make = {Task.COPY: self._copy, Task.RETRIEVAL: self._retrieval, Task.TEXT: self._text}
        tokens, asked = make[self.task](generator)
        labels = tokens[1:].masked_fill(~asked[1:], IGNORED)
        return tokens[:-1], labels

    def _copy(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        half = self.length // 2 + 1
        first = torch.randint(SYMBOLS, (half,), generator=generator)
        tokens = torch.cat([first, first])[: self.length + 1]
        return tokens, torch.arange(len(tokens)) >= half

    def _retrieval(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(SYMBOLS, (self.length + 1,), generator=generator)
        pairs = min((len(tokens) - 3 * ASKED) // EVERY, SYMBOLS)
        keys = torch.randperm(SYMBOLS, generator=generator)[:pairs]
        places = torch.arange(pairs) * EVERY
        tokens[places], tokens[places + 1] = QUERY, keys
        chosen = torch.randint(pairs, (ASKED,), generator=generator)
        end = tokens[-3 * ASKED :].view(ASKED, 3)
        end[:, 0], end[:, 1], end[:, 2] = QUERY, keys[chosen], tokens[places[chosen] + 2]
        asked = torch.zeros(len(tokens), dtype=torch.bool)
        asked[-3 * ASKED :].view(ASKED, 3)[:, 2] = True
        return tokens, asked

    def _text(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        assert self.text is not None, "a corpus of a text has one"
        start = int(torch.randint(len(self.text) - self.length, (), generator=generator))
        tokens = self.text[start : start + self.length + 1].long()
        return tokens, torch.ones(len(tokens), dtype=torch.bool)


def read_text(path: Path, length: int) -> Tensor:
    """The bytes of a file, or of all .txt and .md files of a folder in the order of names: uint8.

    Raises:
        ValueError: There are too few bytes for a sample.
    """
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in (".txt", ".md"))
    text = np.frombuffer(b"\n".join(each.read_bytes() for each in files), np.uint8)
    if len(text) <= length:
        raise ValueError(f"text must have more than {length} bytes, {path} has {len(text)}")
    return torch.from_numpy(text.copy())
