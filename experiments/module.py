"""The base of Lightning modules whose training steps do not wait for the device."""

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW


class TrainingModule(L.LightningModule):
    """A module whose training steps do not wait for the device.

    Attributes:
        measured: What the last training step measured, by the name under which it is logged every
            `log_every_n_steps` steps. The progress bar `StepBar` shows it.
    """

    def __init__(self):
        super().__init__()
        self.measured: dict[str, Tensor] = {}

    def measure(self, **values: Tensor) -> None:
        """Keeps values of this training step as `train/NAME`."""
        self.measured |= {f"train/{name}": value.detach() for name, value in values.items()}

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        # `log` takes part of a millisecond, and `log(prog_bar=True)` waits for the device in every
        # step.
        trainer, step = self.trainer, self.trainer.global_step
        every: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if (every and step % every == 0) or trainer.should_stop or step == trainer.max_steps:
            self.log_dict(self.measured)

    def seed_step(self, seed: int) -> None:
        """Seeds the random numbers of a step on the host and on the device of this module.

        `torch.manual_seed` does the same, but takes a millisecond: it stores a traceback for each
        kind of device that is not in use.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def adamw(self, parameters, **options) -> AdamW:
        """AdamW in one kernel.

        With the scaled losses of float16 it skips a step itself if a gradient is not finite. In
        other precisions such a step makes weights NaN, as with any AdamW.
        """
        optimizer = AdamW(parameters, **options, fused=True)
        if self.trainer.gradient_clip_val:
            # Lightning must divide the gradients by the scale of float16 before it clips them, and
            # does not if the optimizer says that it divides them itself.
            optimizer._step_supports_amp_scaling = False  # pyright: ignore[reportAttributeAccessIssue]
        return optimizer

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        # Checkpoints have options of their optimizer, which older ones did not fuse.
        for state in checkpoint.get("optimizer_states", ()):
            for group in state["param_groups"]:
                group["fused"] = True
