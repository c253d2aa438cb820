"""Training, saving and resuming a language model with context parallelism: see `train`."""

import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from experiments.long_context.choices import Precision, Settings
from experiments.long_context.corpus import IGNORED, VOCABULARY, Corpus, read_text
from experiments.long_context.model import LanguageModel
from masks._parse import parse
from sparseflash.distributed import ContextPlan, Copies, context_parallel_attention, make_plan

CLIP = 1.0  # largest norm of the gradient
LAST = "last"  # the file with the name of the last complete checkpoint


class Recipe:
    """The plan, samples, model and loss of a rank.

    Args:
        settings: The settings, equal on all ranks.
        data, context: Meshes of one dimension: ranks that read different sequences, and ranks that
            share a sequence.
        device: Device of this rank.
    """

    def __init__(
        self, settings: Settings, data: DeviceMesh, context: DeviceMesh, device: torch.device
    ):
        self.settings, self.data, self.device = settings, data, device
        mask = parse(settings.pattern)(settings.tokens, settings.block_size)
        self.plan: ContextPlan = make_plan(mask, context, settings.strategy)
        self.rank = context.get_local_rank()
        self.positions = self.plan.positions(self.rank).to(device)
        ranks = {"group": context, "transport": Copies.where_possible(context, device)}
        self.attend = partial(context_parallel_attention, plan=self.plan, **ranks)
        length, path = settings.tokens, settings.text
        text = None if path is None else read_text(path, length)
        self.corpus = Corpus(settings.task, length, settings.seed, text)

    def model(self) -> nn.Module:
        """The model, its parameters sharded over all ranks."""
        s = self.settings
        torch.manual_seed(s.seed)  # every rank starts from the same weights
        sizes = (s.layers, s.width, s.heads, s.kv_heads)
        model = LanguageModel(VOCABULARY, *sizes, recompute=s.recompute)
        model = model.to(
            self.device, torch.float64 if s.precision is Precision.DOUBLE else torch.float32
        )
        every = init_device_mesh(self.device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if s.precision is Precision.MIXED:
            # Inputs are not cast: the angles of far positions need float32, and torch before 2.13
            # does not cast them again where it recomputes a layer.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for layer in model.layers:
            fully_shard(layer, mesh=every, mp_policy=policy)
        fully_shard(model, mesh=every, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is a sum over all ranks, divided by the number of all labels.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # which gloo supports too
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.settings.lr, (0.9, 0.95))

    def warmth(self, step: int) -> float:
        """The learning rate of a step over that after the warm-up."""
        return min(1.0, (step + 1) / self.settings.warm_up)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), each (samples of this row, tokens of this rank).

        Labels are shifted in the whole sequence, and sharded after that.
        """
        each = self.settings.batch // self.data.size()
        first = step * self.settings.batch + self.data.get_local_rank() * each
        samples = [self.corpus.sample(number) for number in range(first, first + each)]
        whole = (torch.stack(parts) for parts in zip(*samples, strict=True))
        tokens, labels = (self.plan.shard(x, self.rank, 1).to(self.device) for x in whole)
        return tokens, labels

    def loss(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(the loss of this rank, which is differentiated; the loss summed over ranks)"""
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
    """A model with its optimizer, on the ranks of the process group.

    Args:
        settings: The settings, equal on all ranks.
        folder: Folder of the checkpoints.
        device: Device of this rank.

    Raises:
        ValueError: The run in the folder has other settings, or these do not fit the ranks.
    """

    def __init__(self, settings: Settings, folder: Path, device: torch.device):
        self.settings, self.folder, self.step = settings, folder, 0
        settings.check_resumed(folder)
        shape = settings.mesh(dist.get_world_size())
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
        self.recipe = Recipe(settings, mesh["data"], mesh["context"], device)
        self.model = self.recipe.model()
        self.optimizer = self.recipe.optimizer(self.model)
        self._resume()

    def run(self) -> list[float]:
        """Trains up to the last step; returns the loss of every step of this run."""
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
        dist.barrier()  # only a complete checkpoint becomes the last one
        if dist.get_rank() == 0:
            self.settings.save(self.folder)
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


def start() -> torch.device:
    """Joins the process group, or makes one of a single process; returns the device."""
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
