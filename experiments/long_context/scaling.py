"""Weak and strong scaling of context-parallel attention.

    torchrun --nproc-per-node 2 -m experiments.long_context.scaling weak
    torchrun --nproc-per-node 2 -m experiments.long_context.scaling strong
    python -m experiments.long_context.scaling weak --dry-run --ranks 8

It measures 1, 2, 4, ... of the processes, forward and forward with backward: context plans, and an
all-gather and a ring with the same kernels. Before a case is timed, its output and gradients are
compared with those of the all-gather. On CPUs it uses gloo and small sizes.

- The record has the predicted times of every plan before anything is measured. --machine sets the
  rates of the prediction, which `experiments.long_context.calibrate` fits to other records. With
  --dry-run it only plans and predicts, and needs no other process.
- An implementation that does not fit the memory of a device is skipped, and the record says so.
- A time is the median over runs of the slowest rank. Ranks start each run at the same time, and
  GPUs are busy for a while before, because a rested GPU has a higher clock. The host is ahead of
  the GPU at the start, as in a training step, so that the time before the first kernel is launched
  is not part of it.
- If a rank receives many keys, a second plan exchanges them in groups of heads, which limits the
  memory of a rank (`round_tokens`). It is called from Python, and captured in CUDA graphs.
- Exposed communication is the time minus the time of the same run without exchanges, both timed in
  turn. The single rank is timed after the others, when devices have been under load.
- Weak efficiency compares the useful FLOP/s of a rank with those of a single rank, because with
  most patterns the work of a token grows with the sequence.

It writes long-context-KIND-RANKS-<device>.json and pictures. The name also has the tokens and the
heads that are not the default: long-context-strong-2m-16-4-heads-2-<device>.json. A record is only
replaced with --overwrite.
"""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from experiments.cli import RESULTS, Output, check_known, usage_errors
from experiments.instruments import Log, command
from experiments.long_context.choices import Kind, Way

TOKENS_A_RANK, TOKENS, HEADS = 2**17, 2**20, 16
WAYS = tuple(Way)


def main(
    kind: Kind,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a rank (weak) or of the sequence (strong)."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1)] = HEADS,
    kv_heads: Annotated[int, typer.Option(min=1)] = HEADS,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 128,
    window: Annotated[int, typer.Option(min=1, help="Tokens of a window, and of top-k.")] = 4096,
    only: Annotated[str, typer.Option(help="Patterns, separated by commas. Default: all.")] = "",
    implementations: Annotated[
        str,
        typer.Option(help=f"Of {', '.join(WAYS)}; separated by commas. Default: all."),
    ] = "",
    machine: Annotated[
        Path | None,
        typer.Option(exists=True, help="Rates for predictions, from the command calibrate."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan and predict.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest number of ranks of a dry run. Default: that of torchrun."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Start no case after this many seconds.")] = 480.0,
    number: Annotated[  # torchrun would take --run for an abbreviation of its own --run-path
        int,
        typer.Option(min=1, help="Number of this run, if several measure some of the masks each."),
    ] = 1,
    output: Output = RESULTS,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Allow to replace records.")
    ] = False,
) -> None:
    """Measure weak or strong scaling on the processes of torchrun."""
    begin = time.monotonic()
    import torch
    import torch.distributed as dist

    from experiments.long_context import measurement
    from experiments.long_context.cases import cases, measured_order, predicted
    from experiments.long_context.plots import draw
    from sparseflash.distributed.simulation import Attention, Machine

    if ranks is not None and not dry_run:
        raise typer.BadParameter(
            "--ranks needs --dry-run; otherwise torchrun sets the number of ranks"
        )
    count = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if dry_run and rank > 0:
        return
    counts = sorted({*(n for n in (2**i for i in range(12)) if n <= count), count})
    length = tokens or (TOKENS_A_RANK if kind is Kind.WEAK else TOKENS)
    with usage_errors():
        rates = Machine() if machine is None else Machine.load(machine)
        chosen = only.split(",") if only else ()
        ways = implementations.split(",") if implementations else WAYS
        check_known("implementation", ways, WAYS)
        found = list(cases(kind, length, counts, window, chosen, kv_heads))
    device = torch.device("cpu") if dry_run else measurement.start()
    dtype = torch.bfloat16 if dry_run or device.type == "cuda" else torch.float32
    sizes = Attention(heads, kv_heads, head_dim, dtype=dtype)
    said = [predicted(case, rates, sizes) for case in found]
    log = None
    if rank == 0:
        name = "-".join(["long-context", kind, *_choices(tokens, heads, kv_heads), f"{count}"])
        name += f"-run-{number}" if number > 1 else ""
        name += "-predicted" if dry_run else ""
        facts = {"machine": asdict(rates), "predicted": [asdict(each) for each in said]}
        facts |= {"window": window, "torchrun": count, "kind": kind}
        log = Log(name, device.type, output, overwrite, **facts)
        if log.path.exists() and not overwrite:
            raise typer.BadParameter(
                f"{log.path} exists: give another --output, or --overwrite to replace it"
            )
        log.add("begin", [], {}, complete=dry_run)
    if not dry_run:
        # All ranks make all groups.
        groups = {n: cast(dist.ProcessGroup, dist.new_group(list(range(n)))) for n in counts}
        if count > 1:
            setting = measurement.Setting(kind, sizes, groups[counts[-1]], rank, device)
            if rank < counts[-1]:
                exchanged = [asdict(each) for each in measurement.exchanges(setting)]
                if log is not None:
                    log.facts["exchanges"] = exchanged
            dist.barrier()
        for case in measured_order(found):
            left = seconds - (time.monotonic() - begin)
            if not measurement.agreed(left > 0, device):
                continue
            rows, skipped = [], {}
            if rank < case.ranks:
                group = groups[case.ranks] if case.ranks > 1 else None
                setting = measurement.Setting(kind, sizes, group, rank, device)
                rows, skipped = measurement.measure(setting, case, [Way(way) for way in ways])
            if log is not None:
                problem = f"{case.pattern}, {case.ranks} ranks"
                log.add(problem, rows, skipped, complete=False)
                print(f"{problem}: {time.monotonic() - begin:.0f} s", flush=True)
            dist.barrier()
    if log is not None:
        measurement.show_predicted(said)
        if dry_run:
            print(f"wrote {log.path}")
        else:
            log.add("end", [], {}, complete=True)
            measurement.show(log, said)
        for path in draw(log.path, log.path):
            print(f"wrote {path}")
    if not dry_run:
        dist.barrier()
        dist.destroy_process_group()


def _choices(tokens: int | None, heads: int, kv_heads: int) -> list[str]:
    """The parts of the name of a record that say which sizes were chosen."""
    binary = {"m": 2**20, "k": 2**10, "": 1}
    unit = next(name for name, size in binary.items() if (tokens or 1) % size == 0)
    found = [] if tokens is None else [f"{tokens // binary[unit]}{unit}"]
    default = heads == kv_heads == HEADS
    return found if default else [*found, f"{heads}-{kv_heads}-heads"]


if __name__ == "__main__":
    command(main)
