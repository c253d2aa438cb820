"""Trains a small language model with context parallelism and sharded parameters.

    torchrun --nproc-per-node 2 -m experiments.long_context.train --tokens 131072 --context 2

Ranks form a mesh (data, context). The ranks of a row share their sequences by a context plan, rows
read different sequences, and parameters are sharded over all ranks (FSDP2). Losses and gradients
are those of one process with the whole batch. A run saves sharded checkpoints. The same command
resumes from the last one, exactly on as many ranks, up to rounding on another number of ranks.
`--lightning` trains the same model on the same samples with the training loop and checkpoints of
Lightning.
"""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli import needs_extra, output_folder, usage_errors
from experiments.instruments import command
from experiments.long_context.choices import Precision, Settings, Task


def main(
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of checkpoints.")] = Path(
        "runs/long-context"
    ),
    task: Task = Settings.task,
    text: Annotated[
        Path | None, typer.Option(exists=True, help="File or folder that the task text reads.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a sequence.")] = Settings.tokens,
    pattern: Annotated[str, typer.Option(help="A pattern that `python -m masks` reads.")] = (
        Settings.pattern
    ),
    block_size: Annotated[int, typer.Option(min=16, max=256)] = Settings.block_size,
    strategy: Annotated[
        str, typer.Option(help="Strategy of the context plan.")
    ] = Settings.strategy,
    context: Annotated[
        int, typer.Option(min=1, help="Ranks that share a sequence.")
    ] = Settings.context,
    layers: Annotated[int, typer.Option(min=1)] = Settings.layers,
    width: Annotated[int, typer.Option(min=16)] = Settings.width,
    heads: Annotated[int, typer.Option(min=1)] = Settings.heads,
    kv_heads: Annotated[int, typer.Option(min=1)] = Settings.kv_heads,
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences of a step, over all ranks.")
    ] = Settings.batch,
    steps: Annotated[int, typer.Option(min=1)] = Settings.steps,
    lr: float = Settings.lr,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of warm-up.")] = Settings.warm_up,
    recompute: Annotated[
        bool, typer.Option(help="Recompute activations in the backward pass.")
    ] = Settings.recompute,
    precision: Precision = Settings.precision,
    seed: int = Settings.seed,
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.")
    ] = Settings.save_every,
    lightning: Annotated[
        bool, typer.Option("--lightning", help="Use the Trainer of Lightning.")
    ] = False,
) -> None:
    """Train on the processes of torchrun, or on this one; the same command resumes."""
    chosen = dict(locals())
    output, lightning = chosen.pop("output"), chosen.pop("lightning")
    if (task is Task.TEXT) != (text is not None):
        raise typer.BadParameter("--task text needs --text, and no other task takes it")
    with usage_errors():
        settings = Settings(**chosen)
    output = output_folder(output, overwrite=False)
    import torch.distributed as dist

    from experiments.long_context import training

    device = training.start()
    if lightning:
        needs_extra("lra", "lightning")
        from experiments.long_context.learner import fit

        fit(settings, output, device)
    else:
        with usage_errors():
            run = training.Training(settings, output, device)
        run.run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    command(main)
