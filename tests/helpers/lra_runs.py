"""Runs of a small task of Long Range Arena's form, by Lightning's trainer."""

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from experiments.lra.batches import ArenaData
from experiments.lra.callbacks import Last
from experiments.lra.learner import Learner, ObjectiveConfig, OptimizerConfig
from experiments.lra.model import EncoderConfig
from experiments.lra.tasks import SPLITS, Sample, Shape, Task


class Majority(Task):
    """Which symbol is more frequent? Learned in a few steps; `random` labels never."""

    name = "majority"

    def __init__(self, random: bool = False):
        self.shape = Shape(seq_len=16, vocabulary=3, classes=2)
        self.random = random

    def splits(self, data_root):
        return {split: self.samples(n) for n, split in enumerate(SPLITS)}

    def samples(self, stream):
        random = np.random.default_rng(stream)
        ids = random.integers(1, 3, (96, 15))
        labels = random.integers(2, size=96) if self.random else (ids == 2).sum(1) > 7
        return [Sample([row], int(label)) for row, label in zip(ids, labels, strict=True)]


ENCODER = EncoderConfig(dim=16, feedforward=32, block_size=16, attention="local(4)")


class Losses(Callback):
    def __init__(self, killed_at: int | None = None):
        self.values, self.killed_at = {}, killed_at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values[trainer.global_step] = float(outputs["loss"])
        if trainer.global_step == self.killed_at:
            raise SystemExit


def fit(
    folder,
    *callbacks,
    steps=12,
    task=None,
    objective=None,
    ckpt_path=None,
    seed=0,
    every=2,
    accelerator="cpu",
    training=None,
    **options,
):
    """Trains; training: further arguments of the trainer, options: those of the learner."""
    task = task or Majority()
    torch.manual_seed(seed)
    learner = Learner(
        task,
        options.pop("encoder", ENCODER),
        OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        objective or ObjectiveConfig(),
        seed=seed,
        **options,
    )
    losses = next((c for c in callbacks if isinstance(c, Losses)), Losses())
    last = Last(every)
    last.dirpath = str(folder)
    trainer = L.Trainer(
        accelerator=accelerator,
        max_steps=steps,
        val_check_interval=2 * every,
        check_val_every_n_epoch=None,
        callbacks=[*{id(c): c for c in (*callbacks, losses, last)}.values()],
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
        **{"logger": False, "enable_progress_bar": False, **(training or {})},
    )
    data = ArenaData(task, folder, batch_size=8, seed=seed)
    trainer.fit(learner, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, learner, data, losses.values
