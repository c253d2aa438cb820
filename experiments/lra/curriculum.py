"""Trains Pathfinder with labels only, from short contours to those of the arena.

    python -m experiments.lra.curriculum --output runs/curriculum/seed0 -- \\
        --preset curriculum/pathfinder32

Options after `--` are passed to `python -m experiments.lra fit` in every stage. A stage ends when
its validation accuracy is high enough, when it no longer rises, or after its number of steps. The
next stage starts from its best weights. After `--seconds`, Ctrl-C or a kill, the same command
resumes. `--export` and `--import` move a run to another machine in files of less than 15 MB. A
resumed run may have other numbers of steps for its stages; the learning rate falls over the last
fifth of them. Other options need another `--output`, but for those of the machine, such as
--data.workers.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli import ExportTo, ImportFrom, Seconds, needs_extra, usage_errors
from experiments.files import RESULT, read_json, write_json
from experiments.lra.exported import EVALUATION_SECONDS, compact
from experiments.lra.options import OPTIONS, check_options, differences
from experiments.pieces import export, restore

PROGRESS, WHOLE_RESULT = "progress.json", "curriculum.json"  # of all stages
STAGE_SEED = 10_000  # difference of the seeds of consecutive stages


@dataclass(frozen=True)
class Stage:
    """One stage of a curriculum.

    Attributes:
        difficulty: Difficulty of its validation images; see `tasks.Pathfinder`.
        shorter: Share of the training images with shorter contours.
        enough: Validation accuracy at which the stage ends; above 1 for never.
        steps: Largest number of steps.
    """

    difficulty: str
    shorter: float
    enough: float
    steps: int

    @classmethod
    def parse(cls, text: str) -> "Stage":
        """Reads `difficulty:shorter:enough:steps`.

        Raises:
            ValueError: The text has another form.
        """
        from experiments.lra.tasks.snakes import DIFFICULTIES

        try:
            difficulty, shorter, enough, steps = text.split(":")
            stage = cls(difficulty, float(shorter), float(enough), int(steps))
        except ValueError as error:
            raise ValueError(
                f"a stage must be difficulty:shorter:enough:steps, got {text!r}"
            ) from error
        if difficulty not in DIFFICULTIES or not 0 <= stage.shorter <= 1 or stage.steps < 1:
            raise ValueError(
                f"a stage must have a difficulty of {sorted(DIFFICULTIES)}, shorter from 0 to 1 "
                f"and at least one step, got {text!r}"
            )
        return stage

    def in_words(self) -> str:
        """What it trains on, and when it ends."""
        enough = f" or a validation accuracy of {self.enough:g}" if self.enough <= 1 else ""
        return (
            f"{self.difficulty} images, {100 * self.shorter:g} % of those for training with "
            f"shorter contours, up to {self.steps:,} steps{enough}"
        )

    def folder(self, number: int) -> str:
        return f"{number}-{self.difficulty}-{self.shorter:g}"


STAGES = (
    "easy:1:0.85:2000",
    "easy:0.5:0.93:4000",
    "intermediate:0.5:0.9:6000",
    "hard:0.5:2:12000",
)


def main(
    arguments: Annotated[
        list[str], typer.Argument(help="Options of python -m experiments.lra fit.")
    ],
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the run.")],
    stage: Annotated[
        list[str], typer.Option(help="A stage, as difficulty:shorter:enough:steps; repeatable.")
    ] = list(STAGES),  # noqa: B006
    seed: Annotated[int, typer.Option(min=0)] = 0,
    seconds: Seconds = None,
    patience: Annotated[
        int,
        typer.Option(help="A stage ends after this many validations without a better one.", min=1),
    ] = 8,
    export_to: ExportTo = None,
    resume: ImportFrom = None,
) -> None:
    """Train on Pathfinder in stages; the same command resumes."""
    needs_extra("lra", "lightning")
    end = None if seconds is None else time.time() + seconds
    with usage_errors():
        if resume is not None and not (output / PROGRESS).exists():
            restore(resume, output)
        run = Run.of(output, [Stage.parse(text) for text in stage], seed)
        check_options(output, [f"--patience={patience}", *arguments], run.has_progress)
    try:
        while not run.ended:
            run.train_stage(arguments, patience, end, export_to)
            if end is not None and time.time() >= end - EVALUATION_SECONDS:
                break
    except SystemExit:  # interrupted, which is saved as any other end, or an option is wrong
        if run.has_progress:
            run.save(export_to)
        raise
    run.save(export_to)
    print(run.in_words())


def _that_must_agree(stages: list[Stage], seed: int, first: int) -> list[str]:
    """The seed, and stages from `first` on without their numbers of steps, each as NAME=VALUE."""
    rules = [f"{stage.difficulty}:{stage.shorter:g}:{stage.enough:g}" for stage in stages]
    return [
        f"--seed={seed}",
        *(f"stage {number}={rule}" for number, rule in enumerate(rules, 1) if number > first),
    ]


@dataclass
class Run:
    """The state of a curriculum in a folder.

    Attributes:
        output: The folder, in which each stage has a folder.
        stages: All stages.
        seed: Seed of the first stage, from which those of the others follow.
        number: Index of the current stage, or len(stages) after the last one.
        stuck: Whether a stage was stopped because it was stuck at chance.
        seconds: Time that earlier commands took.
        of_stage: Time of training in the current stage that `seconds` includes.
        started: Time at which this command started, in seconds since 1970.
    """

    output: Path
    stages: list[Stage]
    seed: int
    number: int = 0
    stuck: bool = False
    seconds: float = 0.0
    of_stage: float = 0.0
    started: float = field(default_factory=time.time)

    @classmethod
    def of(cls, output: Path, stages: list[Stage], seed: int) -> "Run":
        """Reads the run of a folder, or starts a new one.

        Raises:
            ValueError: The folder contains another run or a damaged one.
        """
        path = output / PROGRESS
        if not path.exists():
            run = cls(output, stages, seed)
            run.seconds = run._trained_seconds()
            return run
        try:
            facts = json.loads(path.read_text())
            known = "of_stage" in facts  # not in older files
            found = [Stage(**stage) for stage in facts.pop("stages")]
            run = cls(output, found, **facts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        # Finished stages may differ, and later stages may differ in their number of steps: the
        # learning rate falls over the last of them.
        recorded = _that_must_agree(found, run.seed, run.number)
        own = _that_must_agree(stages, seed, run.number)
        if recorded != own:
            raise ValueError(
                f"{output} has a run with another seed or other stages: "
                f"{differences(recorded, own)}; give the recorded ones, or another --output"
            )
        run.stages = found[: run.number] + stages[run.number :]
        if known:  # a command that was killed trained for longer than it could write here
            run.seconds += max(0.0, run._trained_seconds() - run.of_stage)
        return run

    @property
    def has_progress(self) -> bool:
        """Whether there is anything to resume."""
        return self.stuck or self.number > 0 or self.checkpoint(0, "last").exists()

    @property
    def ended(self) -> bool:
        return self.stuck or self.number == len(self.stages)

    def in_words(self) -> str:
        """How far the run is, and where its result is."""
        if self.stuck:
            state = f"{self._place()} was stuck at chance, which ends the run"
        elif self.ended:
            state = f"all {len(self.stages)} stages have ended"
        else:
            state = f"{self._place()} has not ended; the same command resumes"
        return f"{state}: {self.output / WHOLE_RESULT}"

    def _place(self) -> str:
        return f"stage {self.number + 1} of {len(self.stages)}"

    def folder(self, number: int) -> Path:
        return self.output / self.stages[number].folder(number)

    def checkpoint(self, number: int, name: str) -> Path:
        return self.folder(number) / "checkpoints" / f"{name}.ckpt"

    def train_stage(
        self, arguments: list[str], patience: int, end: float | None, export_to: Path | None
    ) -> None:
        """Trains the current stage to its end, or to the time limit."""
        # Imported here, so that --help and errors of options are quick.
        from experiments.lra.command import fit

        number = self.number
        last = number == len(self.stages) - 1
        given = [*arguments, *self._arguments(number, None if last else patience)]
        if end is not None:
            given += ["--deadline.at", str(end - EVALUATION_SECONDS)]
        # Before what Lightning prints, also if the output is a file.
        print(f"{self._place()}: {self.stages[number].in_words()}", flush=True)

        def trained(ended: bool, stuck: bool) -> None:
            self.stuck = stuck
            self.number += ended and not stuck
            self.save(export_to)

        fit(given, self.folder(number), trained, test=last)

    def _arguments(self, number: int, patience: int | None) -> list[str]:
        stage = self.stages[number]
        values: dict[str, object] = {
            "data.task.init_args.difficulty": stage.difficulty,
            "data.task.init_args.shorter": stage.shorter,
            "seed_everything": self.seed + STAGE_SEED * number,
            "trainer.max_steps": stage.steps,
        }
        if stage.enough <= 1:
            values["enough.accuracy"] = stage.enough
        if patience is not None:
            values["enough.patience"] = patience
        if (last := self.checkpoint(number, "last")).exists():
            values["ckpt_path"] = last
        elif number:
            values["model.init_from"] = self.checkpoint(number - 1, "best")
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]

    def save(self, export_to: Path | None) -> None:
        """Writes the state of the run, and exports it."""
        facts = {
            "stages": [asdict(stage) for stage in self.stages],
            "seed": self.seed,
            "number": self.number,
            "stuck": self.stuck,
            "seconds": self._seconds(),
            "of_stage": self._trained_seconds(),
        }
        write_json(self.output / PROGRESS, facts)
        write_json(self.output / WHOLE_RESULT, self.result())
        if export_to is not None:
            export(self._files(), export_to)
            write_json(export_to / WHOLE_RESULT, self.result())

    def result(self) -> dict:
        """The result so far: the curve of each stage, and the test of the last one."""
        stages = []
        for number, stage in enumerate(self.stages[: self.number + 1]):
            curve = read_json(self.folder(number) / "curve.json", [])
            stages.append(
                asdict(stage) | {"trained": curve[-1][0] if curve else 0, "curve": curve}
            )
        tested = read_json(self.folder(len(self.stages) - 1) / RESULT, {})
        facts = {"seed": self.seed, "stuck": self.stuck, "ended": self.ended}
        return tested | facts | {"seconds": round(self._seconds()), "stages": stages}

    def _seconds(self) -> float:
        return self.seconds + time.time() - self.started

    def _trained_seconds(self) -> float:
        """Time of training and validation in the checkpoint from which the stage is resumed."""
        if self.number == len(self.stages) or not self.checkpoint(self.number, "last").exists():
            return 0.0
        from experiments.lra.callbacks import Curve
        from experiments.lra.learner import read_checkpoint

        checkpoint = read_checkpoint(self.checkpoint(self.number, "last"))
        return checkpoint["callbacks"][Curve().state_key].get("seconds") or 0.0

    def _files(self) -> dict[str, bytes]:
        """The files that another machine needs to resume the run.

        These are the last checkpoint of the current stage, the best one of it or of the previous
        stage, and the curves.
        """
        paths = [self.output / PROGRESS, self.output / OPTIONS, *self.output.glob("*/curve.json")]
        files = {str(path.relative_to(self.output)): path.read_bytes() for path in paths}
        best = [
            path
            for number in range(min(self.number, len(self.stages) - 1), -1, -1)
            if (path := self.checkpoint(number, "best")).exists()
        ][:1]
        last = [self.checkpoint(self.number, "last")] if self.number < len(self.stages) else []
        for path in (*best, *filter(Path.exists, last)):
            files[str(path.relative_to(self.output))] = compact(path, path in last)
        return files


if __name__ == "__main__":
    typer.run(main)
