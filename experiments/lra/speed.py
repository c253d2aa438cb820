"""Time and memory of a training step of the arena, for every attention.

    python -m experiments.lra.speed
    python -m experiments.lra.speed --name path --tasks path-x,path-256
    python -m experiments.lra.speed --name compiled --compiled --only standard --only flash
    python -m experiments.lra.speed --name real --real data --tasks listops,text,film-pairs,image

A step is the forward pass, backward pass and optimizer step of a whole model, in bfloat16
autocast. The five tasks have the sizes of the Nystromformer protocol, which Table 3 of the
FlashAttention paper uses. By default samples are random, have full length, and there is no dropout
of probabilities. With `--real`, batches are those of the tasks, with their lengths, masked black
pixels and the dropout of the preset; layers of packages and SMYRF never drop probabilities. Each
step is timed as called from Python and as a CUDA graph, because steps of this size are limited by
their launches.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.cli import (
    RESULTS,
    Output,
    Overwrite,
    check_known,
    needs_extra,
    output_file,
    usage_errors,
)
from experiments.files import write_json
from experiments.lra import TASKS


def main(
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    only: Annotated[
        list[str] | None, typer.Option(help="An attention; repeatable. Default: all.")
    ] = None,
    real: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of data, to measure real batches.")
    ] = None,
    scale: Annotated[
        int, typer.Option(help="Divide batch sizes by this, for small machines.", min=1)
    ] = 1,
    compiled: Annotated[
        bool, typer.Option(help="Use torch.compile, except for our kernels.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the record.")] = "arena",
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measure a training step of every attention on every task."""
    import torch

    needs_extra("lra", "lightning")
    from experiments.environment import environment
    from experiments.lra import steps
    from experiments.lra.tasks import MissingData
    from experiments.memory import METHOD

    console = Console(width=132)
    check_known("task", tasks.split(","), steps.KNOWN)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = output_file(output, f"lra-{name}", device.type, overwrite)
    with usage_errors(MissingData):
        cases = {task: steps.case_of(task, real, scale) for task in tasks.split(",")}
    known = dict.fromkeys(i.attention for case in cases.values() for i in case.implementations)
    check_known("attention", only or (), known)
    found, failed = [], []
    record = environment(device) | {
        "memory": METHOD[device.type],
        "compiled": compiled,
        "real": real is not None,
        "models": {task: asdict(case.model) for task, case in cases.items()},
    }
    for task, case in cases.items():
        for implementation in case.implementations:
            if only and implementation.attention not in only:
                continue
            try:
                found.extend(steps.measure(task, case, implementation, compiled, device))
            except (torch.OutOfMemoryError, ImportError, steps.NotCaptured) as error:
                failed.append([task, implementation.label, str(error).splitlines()[0]])
                console.print(": ".join(failed[-1]), highlight=False)
        console.print(steps.table_of(task, case, [s for s in found if s.task == task]))
        # After each task, so that an interruption loses one task at most.
        record |= {
            "steps": [asdict(step) for step in found],
            "failed": failed,
            "geometric_mean_speedup": steps.means(found),
        }
        write_json(path, record)
    if record["geometric_mean_speedup"]:
        console.print(steps.table_of_means(record["geometric_mean_speedup"]))
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
