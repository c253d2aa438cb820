"""The training of `train` with Lightning: its Trainer, callbacks and checkpoints.

ModelParallelStrategy of Lightning makes the mesh, and its second dimension shares the sequence.
Checkpoints are sharded, and a run resumes from the last one in its folder.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from experiments.cli import usage_errors
from experiments.long_context.choices import Settings
from experiments.long_context.training import CLIP, Recipe

METADATA = "meta.pt"  # the file of a sharded checkpoint that is written last


class Batches(IterableDataset):
    """The batches of one rank, from a step on."""

    def __init__(self, recipe: Recipe, start: int):
        self.recipe, self.start = recipe, start

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from map(self.recipe.batch, range(self.start, self.recipe.settings.steps))


class Learner(L.LightningModule):
    """The model, on the ranks of a mesh (data, context).

    Args:
        settings: The settings, equal on all ranks.
        device: Device of this rank.
    """

    def __init__(self, settings: Settings, device: torch.device):
        super().__init__()
        self.settings, self.on, self.found = settings, device, []

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        assert self.device_mesh is not None, "ModelParallelStrategy makes it"
        data, context = (self.device_mesh[name] for name in self.device_mesh.mesh_dim_names or ())
        with usage_errors():
            self.recipe = Recipe(self.settings, data, context, self.on)
        self.model = self.recipe.model()

    def configure_optimizers(self):
        optimizer = self.recipe.optimizer(self.model)
        scheduler = LambdaLR(optimizer, self.recipe.warmth)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.recipe, self.trainer.global_step), batch_size=None)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        part, loss = self.recipe.loss(self.model, *batch)
        self.found.append(float(loss))
        self.log("loss", loss, prog_bar=True)
        return part


def fit(settings: Settings, folder: Path, device: torch.device) -> list[float]:
    """Trains up to the last step; returns the loss of every step of this run."""
    found = [path.parent for path in folder.glob(f"step=*.ckpt/{METADATA}")]
    with usage_errors():
        rows, context = settings.mesh(dist.get_world_size())
        if found:
            settings.check_resumed(folder)
    dist.barrier()  # all ranks have read the settings
    if dist.get_rank() == 0:
        settings.save(folder)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    saved = ModelCheckpoint(
        folder,
        filename="{step}",
        every_n_train_steps=settings.save_every,
        save_top_k=-1,
        enable_version_counter=False,  # an incomplete checkpoint is replaced
    )
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=devices,
        num_nodes=dist.get_world_size() // devices,
        strategy=ModelParallelStrategy(data_parallel_size=rows, tensor_parallel_size=context),
        max_steps=settings.steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        logger=False,
        enable_model_summary=False,
        callbacks=[saved],
        default_root_dir=folder,
    )
    learner = Learner(settings, device)
    last = max(found, key=lambda path: int(path.stem.removeprefix("step=")), default=None)
    trainer.fit(learner, ckpt_path=last)
    if learner.found and trainer.global_step % settings.save_every:
        trainer.save_checkpoint(folder / f"step={trainer.global_step}.ckpt")
    return learner.found
