"""Several seeds of one run; a run that is stuck at chance is started again with a new seed.

    python -m experiments.lra.seeds --seeds 3 -- --preset nystromformer/listops --data.workers 4

What follows `--` goes to `python -m experiments.lra fit`. Every run has a process and a folder of
its own; runs.json in the folder above holds all results, how many runs were stuck, and the mean.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import typer
from rich.console import Console

from experiments.files import write_json

# Restarts take seeds far from those asked for.
RESTART = 1000


def main(
    arguments: Annotated[list[str], typer.Argument(help="of python -m experiments.lra fit")],
    seeds: Annotated[int, typer.Option(help="how many, from 0", min=1)] = 3,
    restarts: Annotated[int, typer.Option(help="for each seed, at most", min=0)] = 3,
    output: Annotated[Path, typer.Option(file_okay=False)] = Path("runs"),
) -> None:
    """Trains with several seeds and reports mean, deviation and stuck runs."""
    results = []
    for seed in range(seeds):
        results += until_unstuck(seed, restarts, output, arguments)
    summary = summary_of(results)
    write_json(output / "runs.json", summary | {"runs": results})
    Console().print(summary)


def until_unstuck(seed: int, restarts: int, output: Path, arguments: list[str]) -> list[dict]:
    """The results of a seed and of its restarts; all but the last are stuck."""
    results = []
    for attempt in range(restarts + 1):
        results.append(train(seed + RESTART * attempt, output, arguments))
        if not results[-1]["stuck"]:
            break
    return results


def train(seed: int, output: Path, arguments: list[str]) -> dict:
    """The result of one run. Raises CalledProcessError when it fails."""
    folder = output / f"seed{seed}"
    command = [sys.executable, "-m", "experiments.lra", "fit", *arguments]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", str(folder)]
    subprocess.run(command, check=True)
    newest = max(folder.rglob("result.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def summary_of(results: list[dict]) -> dict:
    accuracies = [result["test/accuracy"] for result in results if not result["stuck"]]
    return {
        "accuracy": fmean(accuracies) if accuracies else None,
        "deviation": stdev(accuracies) if len(accuracies) > 1 else None,
        "finished": len(accuracies),
        "stuck": len(results) - len(accuracies),
    }


if __name__ == "__main__":
    typer.run(main)
