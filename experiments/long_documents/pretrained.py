"""Fine-tunes a pre-trained encoder of transformers on documents longer than its positions.

Its positions are repeated, and it is trained on documents with several labels, as in Table 5 of
the FlashAttention paper.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.classification import BinaryF1Score

from experiments.environment import environment
from experiments.files import RESULT, read_results, shared, write_json
from experiments.interruption import Interrupt
from experiments.long_documents.labelled import Document, Labelled
from experiments.long_documents.settings import Settings
from experiments.lra.batches import StepBatches
from experiments.lra.learner import read_checkpoint, repeated
from experiments.pretraining import set_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONS = "embeddings.position_embeddings.weight"
MULTIPLE = 64  # the length of a batch is a multiple of so many tokens
TOKENIZER = "tokenizer.json"


def lengthened(folder: Path, labels: int, tokens: int) -> "PreTrainedModel":
    """A classifier with a saved encoder, whose learned positions are repeated up to `tokens`.

    Position n has the embedding of position n modulo the trained length. Special rows before the
    first position, which RoBERTa has, are not changed.

    Args:
        folder: Folder of the encoder, saved by transformers.
        labels: Number of labels of the new layer, whose weights are random.
        tokens: Largest number of tokens of a document, with special tokens.

    Raises:
        ValueError: The folder has no encoder with learned positions.

    Reference:
        Beltagy, Peters, Cohan 2020, Longformer.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options: dict[str, Any] = {"num_labels": labels, "local_files_only": True}
    try:
        short = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        config = AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no encoder of transformers: {error}") from error
    weights = short.state_dict()
    names = [name for name in weights if name.endswith(POSITIONS)]
    if len(names) != 1:
        raise ValueError(f"{folder} must have an encoder with learned positions")
    padding = getattr(short.get_submodule(names[0].removesuffix(".weight")), "padding_idx", None)
    special = 0 if padding is None else padding + 1
    trained = weights[names[0]]
    longer = repeated(trained[special:], tokens)
    weights[names[0]] = torch.cat([trained[:special], longer])
    config.max_position_embeddings = special + tokens
    model = AutoModelForSequenceClassification.from_config(config)
    model.load_state_dict(weights)
    return model


class Batches:
    """Documents as tokens, padded to the longest of a batch."""

    def __init__(self, settings: Settings, data: Labelled):
        from transformers import AutoTokenizer

        # Without the file, transformers would make a tokenizer without words.
        if not (Path(settings.encoder) / TOKENIZER).exists():
            raise ValueError(f"{settings.encoder} must have {TOKENIZER}, a fast tokenizer")
        read = AutoTokenizer.from_pretrained(settings.encoder, local_files_only=True)
        self.read, self.settings, self.data = read, settings, data

    def training(self, start: int) -> Iterator[dict[str, Tensor]]:
        """The batches of the steps from `start` on, which depend only on seed and step."""
        own, settings = self.data.splits["train"], self.settings
        for indices in StepBatches(len(own), settings.batch_size, settings.seed, start, 0, 1):
            yield self.of([own[i] for i in indices])

    def evaluation(self, split: str) -> Iterator[dict[str, Tensor]]:
        own, size = self.data.splits[split], self.settings.batch_size
        for begin in range(0, len(own), size):
            yield self.of(own[begin : begin + size])

    def of(self, documents: list[Document]) -> dict[str, Tensor]:
        """input_ids and attention_mask (batch, tokens), targets (batch, labels)."""
        read = self.read(
            [document.text for document in documents],
            truncation=True,
            max_length=self.settings.tokens,
            padding=True,
            pad_to_multiple_of=math.gcd(MULTIPLE, self.settings.tokens),
            return_tensors="pt",
        )
        targets = torch.zeros(len(documents), len(self.data.labels))
        for row, document in zip(targets, documents, strict=True):
            row[list(document.labels)] = 1.0
        return {name: read[name] for name in ("input_ids", "attention_mask")} | {
            "targets": targets
        }


class Run:
    """The training of a classifier, which resumes exactly from its last checkpoint.

    Args:
        settings: Settings of the run.
        data: The documents.
        output: Folder of the run.
    """

    def __init__(self, settings: Settings, data: Labelled, output: Path):
        self.settings, self.data, self.output = settings, data, output
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.batches = Batches(settings, data)
        torch.manual_seed(settings.seed)  # of the new layer
        model = lengthened(Path(settings.encoder), len(data.labels), settings.tokens)
        set_attention(model, settings.attention)
        self.model = nn.Module.to(model, self.device)
        rate = settings.learning_rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01)
        self.step, self.curve = 0, []
        self.facts = asdict(settings) | {"name": data.name, "data": data.sha256}
        self.last, self.best = output / "last.ckpt", output / "best.ckpt"
        if self.last.exists():
            self._load(self.last)

    def train(self, seconds: float | None = None) -> dict | None:
        """Trains to the end, or for at most so many seconds.

        Returns:
            The contents of result.json, or None if the time limit was reached.

        Raises:
            KeyboardInterrupt: On Ctrl-C, after the current step and its checkpoint.
        """
        end = math.inf if seconds is None else time.time() + seconds
        left = self.settings.steps - self.step
        batches = islice(self.batches.training(self.step), left)
        with Interrupt() as interrupt:
            for batch in track(batches, f"training, {self.settings.tokens:,} tokens", left):
                self._train_step(batch)
                is_last = self.step == self.settings.steps
                stops = interrupt.asked or time.time() > end
                if self.step % self.settings.every == 0 or is_last:
                    self._validate()
                elif stops:
                    self._save(self.last)
                if interrupt.asked and stops:
                    raise KeyboardInterrupt
                if stops and not is_last:
                    return None
        self._load(self.best)
        result = self.facts | {
            "labels": len(self.data.labels),
            "documents": {split: len(own) for split, own in self.data.splits.items()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "micro_f1": self.micro_f1("test"),
            "tested_step": self.step,
            "curve": self.curve,
            "environment": environment(self.device),
        }
        write_json(self.output / RESULT, result)
        return result

    def _train_step(self, batch: dict[str, Tensor]) -> None:
        settings = self.settings
        warm, steps = settings.warmup_steps, settings.steps
        part = min((self.step + 1) / max(warm, 1), (steps - self.step) / max(steps - warm, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(part, 1.0)
        # Exact resumption needs no saved random state.
        torch.manual_seed(1_000_003 * settings.seed + self.step)
        self.model.train()
        logits, targets = self._logits(batch)
        binary_cross_entropy_with_logits(logits, targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def _logits(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        moved = {name: part.to(self.device) for name, part in batch.items()}
        targets = moved.pop("targets")
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(**moved).logits.float(), targets

    def _validate(self) -> None:
        found = self.micro_f1("validation")
        is_best = found > max((point["micro_f1"] for point in self.curve), default=-1.0)
        self.curve.append({"step": self.step, "micro_f1": found})
        if is_best:
            self._save(self.best)
        self._save(self.last)

    def _save(self, path: Path) -> None:
        state = {"facts": self.facts, "step": self.step, "model": self.model.state_dict()}
        if path == self.last:
            state |= {"curve": self.curve, "optimizer": self.optimizer.state_dict()}
        self.output.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        torch.save(state, draft)
        draft.replace(path)

    def _load(self, path: Path) -> None:
        state = read_checkpoint(path)
        if state.get("facts") != self.facts:
            raise ValueError(f"{path} is of a run with other settings or data: move it away first")
        self.model.load_state_dict(state["model"])
        self.step = state["step"]
        if path == self.last:
            self.curve = state["curve"]
            self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def micro_f1(self, split: str) -> float:
        """The micro F1 over all labels of all documents; a label is predicted if P > 1/2."""
        self.model.eval()
        score = BinaryF1Score().to(self.device)
        for batch in self.batches.evaluation(split):
            logits, targets = self._logits(batch)
            score.update((logits > 0).int(), targets.int())
        return float(score.compute())


def gather(folders: list[Path]) -> dict:
    """A record of runs of one data set: for each length the mean, the deviation and the runs.

    Raises:
        ValueError: A folder has no result, or the runs differ in data or device.
    """
    keys = ("name", "data", "tokens", "micro_f1", "environment")
    runs = read_results(folders, "a result of `experiments.long_documents tune`", keys)
    shared("data", (run["data"] for run in runs))
    device = shared("device", (run["environment"]["device"] for run in runs))
    lengths = {}
    for tokens in sorted({run["tokens"] for run in runs}):
        own = [run for run in runs if run["tokens"] == tokens]
        found = [run["micro_f1"] for run in own]
        deviation = stdev(found) if len(own) > 1 else None
        lengths[str(tokens)] = {"micro_f1": fmean(found), "deviation": deviation, "runs": own}
    return {"name": runs[0]["name"], "device": device, "lengths": lengths}
