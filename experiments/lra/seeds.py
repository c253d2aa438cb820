"""Trains several seeds of a run. A run that is stuck at chance is restarted with another seed.

    python -m experiments.lra.seeds --seeds 3 -- --preset nystromformer/listops --data.workers 4

Options after `--` are passed to `python -m experiments.lra fit`. In them, `{seed}` is replaced by
the seed, as in `--model.init_from 'runs/before/seed{seed}/checkpoints/best.ckpt'`. Every run has
its own process and folder, seed<n>. runs.json in the parent folder has all results, the number of
runs that were stuck, and the mean. After `--seconds`, Ctrl-C or a kill, the same command resumes.
Other options need another `--output`, but for those of the machine, such as --data.workers.
The exit status is 1 if runs have not finished, 2 if one failed. `--export` and `--import` move the
runs to another machine in files of less than 15 MB.
"""

import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import typer
from rich.console import Console

from experiments.cli import ExportTo, ImportFrom, Seconds, needs_extra, usage_errors
from experiments.files import RESULT, read_json, write_json
from experiments.lra.exported import EVALUATION_SECONDS, contents
from experiments.lra.options import OPTIONS, check_options
from experiments.pieces import export, restore

# Seeds of restarts are far from those of the command.
RESTART = 1000


def main(
    arguments: Annotated[
        list[str], typer.Argument(help="Options of python -m experiments.lra fit.")
    ],
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    first: Annotated[int, typer.Option(help="The first seed.", min=0)] = 0,
    restarts: Annotated[
        int,
        typer.Option(help="Largest number of restarts of a seed that is stuck at chance.", min=0),
    ] = 3,
    output: Annotated[Path, typer.Option(file_okay=False)] = Path("runs"),
    at_once: Annotated[
        int, typer.Option(help="Number of parallel runs on one device.", min=1)
    ] = 1,
    seconds: Seconds = None,
    export_to: ExportTo = None,
    resume: ImportFrom = None,
) -> None:
    """Train with several seeds, and print their mean, deviation and stuck runs."""
    needs_extra("lra", "lightning")
    if resume is not None and not any(output.glob("seed*")):
        with usage_errors():
            restore(resume, output)
    end = None if seconds is None else time.time() + seconds
    runs = Runs(output, arguments, end)
    with usage_errors():
        runs.check_options()
    try:
        with ThreadPoolExecutor(at_once) as pool:
            chosen = range(first, first + seeds)
            found = pool.map(lambda seed: runs.until_unstuck(seed, restarts), chosen)
            results = [result for of_seed in found for result in of_seed]
    except subprocess.CalledProcessError as error:  # the process has printed the reason
        Console(stderr=True).print(f"a run failed: {shlex.join(error.cmd)}", highlight=False)
        raise typer.Exit(2) from error
    finally:
        if export_to is not None:
            export(runs.files(), export_to)
    summary = summary_of(results)
    write_json(output / "runs.json", summary | {"runs": results})
    Console().print(summary)
    if any(not result["ended"] and not result["stuck"] for result in results):
        Console().print("the time is over; the same command resumes")
        raise typer.Exit(1)


@dataclass(frozen=True)
class Runs:
    """The runs of a command.

    Attributes:
        output: The folder that contains their folders.
        arguments: Options of `python -m experiments.lra fit`.
        end: Time limit in seconds since 1970, or None.
    """

    output: Path
    arguments: list[str]
    end: float | None = None

    def check_options(self) -> None:
        """Checks that the runs of the folder, if any, have these options; see `check_options`."""
        kinds = (RESULT, "checkpoints/*.ckpt")
        started = any(found for kind in kinds for found in self.output.glob(f"seed*/{kind}"))
        check_options(self.output, self.arguments, started)

    def until_unstuck(self, seed: int, restarts: int) -> list[dict]:
        """The results of a seed and of its restarts; all but the last are stuck."""
        results = []
        for attempt in range(restarts + 1):
            results.append(self.train(seed, seed + RESTART * attempt))
            if not results[-1]["stuck"]:
                break
        return results

    def train(self, number: int, seed: int) -> dict:
        """Starts or resumes a run, unless it has finished; returns its result.

        Args:
            number: The value of `{seed}` in the options.
            seed: Seed of the run, which differs from `number` in a restart.

        Raises:
            CalledProcessError: The run failed.
        """
        folder = self.output / f"seed{seed}"
        result = self._result(folder)
        if result["ended"] or result["stuck"] or self._is_over():
            return result
        given = [argument.replace("{seed}", str(number)) for argument in self.arguments]
        subprocess.run([*FIT, *given, *self._options(seed)], check=True)
        return self._result(folder)

    def _options(self, seed: int) -> list[str]:
        """Options of Lightning that set the folder of a run, its checkpoint and its time limit."""
        values: dict[str, object] = {"seed_everything": seed}
        last = self.output / f"seed{seed}" / "checkpoints" / "last.ckpt"
        if last.exists():
            values["ckpt_path"] = last
        else:
            logger = {"save_dir": self.output, "name": "", "version": f"seed{seed}"}
            values["trainer.logger"] = "TensorBoardLogger"
            values |= {f"trainer.logger.{name}": value for name, value in logger.items()}
        if self.end is not None:
            values["deadline.at"] = self.end - EVALUATION_SECONDS
        return [f"--{name}={value}" for name, value in values.items()]

    def _is_over(self) -> bool:
        return self.end is not None and time.time() >= self.end - EVALUATION_SECONDS

    def _result(self, folder: Path) -> dict:
        """The result that a run has written so far."""
        return {"ended": False, "stuck": False} | read_json(folder / RESULT, {})

    def files(self) -> dict[str, bytes]:
        """The files that another machine needs to resume all runs."""
        options = self.output / OPTIONS
        found = {OPTIONS: options.read_bytes()} if options.exists() else {}
        for folder in sorted(self.output.glob("seed*")):
            result = self._result(folder)
            found |= contents(folder, self.output, not result["ended"] and not result["stuck"])
        return found


FIT = (sys.executable, "-m", "experiments.lra", "fit")


def summary_of(results: list[dict]) -> dict:
    """Mean and deviation of the test accuracies; None for pre-training, which has none."""
    tested = [result for result in results if not result["stuck"]]
    accuracies = [result["test/accuracy"] for result in tested if "test/accuracy" in result]
    return {
        "accuracy": fmean(accuracies) if accuracies else None,
        "deviation": stdev(accuracies) if len(accuracies) > 1 else None,
        "finished": len(accuracies),
        "stuck": len(results) - len(tested),
    }


if __name__ == "__main__":
    typer.run(main)
