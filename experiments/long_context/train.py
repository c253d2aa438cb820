"""Trains a small language model on sequences that ranks share, with sharded parameters.

    torchrun --nproc-per-node 2 -m experiments.long_context.train --tokens 131072 --context 2

Ranks form a mesh (data, context): those of one row share their sequences by a context plan, rows
read different ones, and parameters are sharded over all (FSDP2). Losses and gradients are those
of one process with the whole batch. A run saves sharded checkpoints, and the same command goes on
from the last one, exactly, also on another number of ranks but for rounding. `--lightning` trains
the same model on the same samples by Lightning's loop, with its checkpoints.
"""

import os
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from experiments.cli import needs
from experiments.instruments import command
from experiments.long_context.corpus import IGNORED, VOCABULARY, Corpus, Task, read_text
from experiments.long_context.model import LanguageModel
from masks._parse import parse
from sparseflash.distributed import ContextPlan, context_parallel_attention, make_plan

CLIP = 1.0  # most norm of all gradients
LAST = "last"  # the file that names the last whole checkpoint


@dataclass(frozen=True)
class Settings:
    """What is trained, on what and how; see `main`."""

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
    double: bool = False
    seed: int = 0
    save_every: int = 50

    def mesh(self, ranks: int) -> tuple[int, int]:
        """How many rows of ranks read different sequences, and how many ranks share theirs.

        Raises:
            ValueError: The ranks, or the sequences of a step, do not divide so.
        """
        if ranks % self.context:
            raise ValueError(f"context must divide the {ranks} ranks, got {self.context}")
        rows = ranks // self.context
        if self.batch % rows:
            raise ValueError(
                f"batch must be a multiple of the {rows} rows of ranks, got {self.batch}"
            )
        return rows, self.context


class Recipe:
    """What a rank needs to train: its plan, its samples, the model, the loss.

    Args:
        settings: Equal on all ranks.
        data, context: Meshes of one dimension: ranks that read different sequences, and ranks that
            share theirs.
        device: Of this rank.
    """

    def __init__(
        self, settings: Settings, data: DeviceMesh, context: DeviceMesh, device: torch.device
    ):
        self.settings, self.data, self.device = settings, data, device
        mask = parse(settings.pattern)(settings.tokens, settings.block_size)
        self.plan: ContextPlan = make_plan(mask, context, settings.strategy)
        self.rank = context.get_local_rank()
        self.positions = self.plan.positions(self.rank).to(device)
        self.attend = partial(context_parallel_attention, plan=self.plan, group=context)
        length, path = settings.tokens, settings.text
        text = None if path is None else read_text(path, length)
        self.corpus = Corpus(settings.task, length, settings.seed, text)

    def model(self) -> nn.Module:
        """The model, its parameters sharded over all ranks."""
        s = self.settings
        torch.manual_seed(s.seed)  # every rank starts from the same weights
        sizes = (s.layers, s.width, s.heads, s.kv_heads)
        model = LanguageModel(VOCABULARY, *sizes, recompute=s.recompute)
        model = model.to(self.device, torch.float64 if s.double else torch.float32)
        every = init_device_mesh(self.device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if self.device.type == "cuda" and not s.double:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=every, mp_policy=policy)
        fully_shard(model, mesh=every, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is a sum over all ranks, divided by the number of all labels.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # which gloo has too
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.settings.lr, (0.9, 0.95))

    def warmth(self, step: int) -> float:
        """What the learning rate of a step is of that after all steps of warm-up."""
        return min(1.0, (step + 1) / self.settings.warm_up)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), (samples of this row, tokens of this rank): labels are those of the
        whole sequence, shifted before they are sharded.
        """
        each = self.settings.batch // self.data.size()
        first = step * self.settings.batch + self.data.get_local_rank() * each
        samples = [self.corpus.sample(number) for number in range(first, first + each)]
        whole = (torch.stack(parts) for parts in zip(*samples, strict=True))
        tokens, labels = (self.plan.shard(x, self.rank, 1).to(self.device) for x in whole)
        return tokens, labels

    def loss(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The part of this rank, whose gradient is wanted; and the loss, the sum over ranks."""
        count = (labels != IGNORED).sum()
        dist.all_reduce(count)
        logits = model(tokens, self.positions, self.attend)
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).to(wide), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        part = total / count
        whole = part.detach().clone()
        dist.all_reduce(whole)
        return part, whole


class Training:
    """A model and what trains it, on the ranks of the process group.

    Args:
        settings: Equal on all ranks.
        folder: Of the checkpoints.
        device: Of this rank.
    """

    def __init__(self, settings: Settings, folder: Path, device: torch.device):
        self.settings, self.folder, self.step = settings, folder, 0
        shape = settings.mesh(dist.get_world_size())
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
        self.recipe = Recipe(settings, mesh["data"], mesh["context"], device)
        self.model = self.recipe.model()
        self.optimizer = self.recipe.optimizer(self.model)
        self._resume()

    def run(self) -> list[float]:
        """Trains up to the last step; the loss of every step of this run."""
        losses = []
        while self.step < self.settings.steps:
            begin = time.perf_counter()
            losses.append(self._train_step())
            self.step += 1
            if dist.get_rank() == 0:
                seconds = time.perf_counter() - begin
                print(f"step {self.step} loss {losses[-1]:.4f} {seconds:.2f} s", flush=True)
            if self.step % self.settings.save_every == 0 or self.step == self.settings.steps:
                self._save()
        return losses

    def _train_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self.recipe.warmth(self.step)
        part, loss = self.recipe.loss(self.model, *self.recipe.batch(self.step))
        part.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _save(self) -> None:
        name = f"step-{self.step}"
        save(self._state(), checkpoint_id=self.folder / name)
        dist.barrier()  # only a whole checkpoint is the last one
        if dist.get_rank() == 0:
            draft = self.folder / f".{LAST}"
            draft.write_text(str(self.step))
            draft.replace(self.folder / LAST)
        dist.barrier()

    def _resume(self) -> None:
        last = self.folder / LAST
        if not last.exists():
            return
        self.step = int(last.read_text())
        state = self._state()
        load(state, checkpoint_id=self.folder / f"step-{self.step}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main(
    folder: Annotated[Path, typer.Option(help="Of checkpoints.")] = Path("runs/long-context"),
    task: Task = Task.COPY,
    text: Annotated[Path | None, typer.Option(exists=True, help="Of the task text.")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Of a sequence.")] = 4096,
    pattern: Annotated[str, typer.Option(help="As `python -m masks` reads it.")] = (
        Settings.pattern
    ),
    block_size: Annotated[int, typer.Option(min=16, max=256)] = 128,
    strategy: Annotated[str, typer.Option(help="Of the context plan.")] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Ranks that share a sequence.")] = 1,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    width: Annotated[int, typer.Option(min=16)] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step, on all ranks.")] = 4,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    lr: float = 1e-3,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps.")] = 10,
    recompute: Annotated[bool, typer.Option(help="Activations, in the backward pass.")] = True,
    seed: int = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 50,
    lightning: Annotated[bool, typer.Option("--lightning", help="With Lightning's loop.")] = False,
) -> None:
    """Trains on the processes that torchrun started, or on this one."""
    chosen = dict(locals())
    folder, lightning = chosen.pop("folder"), chosen.pop("lightning")
    if (task is Task.TEXT) != (text is not None):
        raise typer.BadParameter("--text names the file of --task text, and of no other task")
    device = _start()
    folder.mkdir(parents=True, exist_ok=True)
    if lightning:
        needs(find_spec("lightning"), "Lightning, of the extra lra: pip install sparseflash[lra]")
        from experiments.long_context.learner import fit

        fit(Settings(**chosen), folder, device)
    else:
        Training(Settings(**chosen), folder, device).run()
    dist.barrier()
    dist.destroy_process_group()


def _start() -> torch.device:
    """Joins the other processes, or a group of its own; the device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


if __name__ == "__main__":
    command(main)
