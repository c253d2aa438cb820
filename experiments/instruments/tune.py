"""Finds the fastest launch configurations of the backend triton on this GPU.

    python -m experiments.instruments.tune --head-dim 128 --block-size 128

times every configuration that fits the device for the forward pass, dQ, dK with dV, and a decoding
step, on a full mask and on a random mask of density 1/16. It prints the configurations with the
least geometric mean of these times. Each result is compared with that of the current configuration
before it is timed. All times are written to tune-<gpu>.json; later runs with other settings add to
it. The configurations in `sparseflash/backends/triton/configs.py` are copied from it by hand.
"""

import itertools
from typing import Annotated

import typer
from rich.console import Console

from experiments.cli import (
    RESULTS,
    BlockSize,
    Dtype,
    Output,
    Overwrite,
    check_known,
    needs_cuda,
    output_file,
    parse_numbers,
)
from experiments.instruments import command


def main(
    head_dim: Annotated[str, typer.Option(help="Head dims, separated by commas.")] = "64,128",
    block_size: Annotated[BlockSize, typer.Option()] = BlockSize.B128,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.BF16,
    passes: Annotated[
        str | None, typer.Option(help="Passes, separated by commas. Default: all.")
    ] = None,
    seq_len: Annotated[
        int, typer.Option(min=1, help="Length in tokens, except for decoding.")
    ] = 8192,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Time every launch configuration that fits the device, and print the fastest."""
    needs_cuda()
    from experiments.instruments import tuning

    chosen = tuning.PASSES if passes is None else passes.split(",")
    check_known("pass", chosen, tuning.PASSES)
    console = Console(width=120)
    path = output_file(output, "tune", "cuda", overwrite)
    sizes = [
        tuning.Problem(dtype.value, dims, int(block_size), batch, max(1, 2048 // dims), seq_len)
        for dims in parse_numbers(head_dim, int, "head dims", "64,128")
    ]
    jobs = [
        (which, problem, list(tuning.candidates(which, problem)))
        for size, which in itertools.product(sizes, chosen)
        for problem in tuning.problems(which, size)
    ]
    tuning.compile_all([(which, problem, c) for which, problem, found in jobs for c in found])
    for which, problem, found in jobs:
        rows = [row for config in found for row in tuning.measure(which, problem, config, console)]
        tuning.save(path, which, problem, rows)
        heads = f" of {problem.packed} heads" if problem.packed else ""
        dims = f"head dim {problem.head_dim}"
        title = f"{which}{heads}, {dims}, blocks of {block_size}, {dtype.value}"
        console.print(tuning.fastest(rows, title))
    print(f"wrote {path}")


if __name__ == "__main__":
    command(main)
