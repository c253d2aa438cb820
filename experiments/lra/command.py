"""The command line of training and testing: that of Lightning, with presets; see `__main__`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from experiments.environment import environment
from experiments.files import RESULT, write_json
from experiments.lra import presets, tasks
from experiments.lra.batches import ArenaData
from experiments.lra.callbacks import (
    Curve,
    Deadline,
    Diverged,
    Enough,
    Interruption,
    StepBar,
    StuckAtChance,
    finite_or_none,
    folder_of,
)
from experiments.lra.causal import moved_discs
from experiments.lra.floors import floors
from experiments.lra.learner import (
    ATTENTION,
    Learner,
    check_warm_up,
    read_checkpoint,
    trained_by,
)
from experiments.lra.model import Expressions
from experiments.lra.parser import Parser
from experiments.lra.tasks import MissingData, Pathfinder, Task

LIGHTNING_VERSION = "pytorch-lightning_version"  # a key of every checkpoint


class ArenaCLI(LightningCLI):
    """Lightning's command line, with one task for data and model, and a test after each run.

    Args:
        folder: Folder of the run; if None, Lightning chooses one. A run that is resumed from
            `FOLDER/checkpoints/last.ckpt` uses FOLDER.
        trained: Called after training, with the command line.
        test: Whether a trained model is tested.
    """

    def __init__(
        self,
        *args,
        folder: Path | None = None,
        trained: Callable[["ArenaCLI"], None] = lambda cli: None,
        test: bool = True,
        **options,
    ):
        self.folder, self.trained, self.test = folder, trained, test
        super().__init__(
            Learner,
            ArenaData,
            *args,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_class=Parser,
            parser_kwargs={"prog": "python -m experiments.lra"},
            **options,
        )

    def add_arguments_to_parser(self, parser) -> None:
        parser.link_arguments("data.task", "model.task", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        parser.add_lightning_class_args(Deadline, "deadline")
        parser.add_lightning_class_args(Enough, "enough")

    def before_instantiate_classes(self) -> None:
        trainer = self.config[str(self.subcommand)].trainer
        if trainer.enable_progress_bar is False:  # Lightning refuses this with a progress bar
            bar = f"{StepBar.__module__}.{StepBar.__name__}"
            trainer.callbacks = [each for each in trainer.callbacks if each.class_path != bar]

    def _parse_ckpt_path(self) -> None:
        """Reads no options from a checkpoint, unlike Lightning: they could name a file to run."""

    def instantiate_classes(self) -> None:
        with errors_in_one_line():
            super().instantiate_classes()

    def before_fit(self) -> None:
        path = self._checkpoint()
        folder = self.folder
        if folder is None and path is not None and path.parent.name == "checkpoints":
            folder = path.parent.parent
        if folder is not None:
            logger = TensorBoardLogger(folder.parent, name="", version=folder.name)
            self.trainer.logger = logger
        if self.folder is not None:  # the command that trains stages finds their checkpoints
            for interruption in self._callbacks(Interruption):
                interruption.resumes = "the same command"
        with errors_in_one_line():
            if path is not None:
                check_resumed(path, self.model.task, self.model.attention)
            # Before anything starts, so that invalid settings give an error of one line.
            check_warm_up(self.model.optimizer, int(self.trainer.max_steps))
            self.datamodule.prepare_data()

    def before_test(self) -> None:
        self._checkpoint()
        with errors_in_one_line():
            self.datamodule.prepare_data()

    def _checkpoint(self) -> Path | None:
        """The checkpoint of the options, or None. Ends the program if it cannot be read."""
        path = self.config[str(self.subcommand)].ckpt_path
        if not path:
            return None
        with errors_in_one_line():
            if LIGHTNING_VERSION not in read_checkpoint(Path(path)):
                raise ValueError(f"{path} is not a checkpoint of a run")
        return Path(path)

    @property
    def stuck(self) -> bool:
        return any(callback.stuck for callback in self._callbacks(StuckAtChance))

    @property
    def diverged(self) -> bool:
        return any(callback.diverged for callback in self._callbacks(Diverged))

    @property
    def ended(self) -> bool:
        """Whether a run was trained to its end, not stopped at its time limit."""
        enough = any(callback.reached for callback in self._callbacks(Enough))
        return enough or self.diverged or self.trainer.global_step >= int(self.trainer.max_steps)

    def after_fit(self) -> None:
        self.trained(self)
        if not self.test and not self.stuck:
            return
        if self.model.pre_trains:  # without labels there is nothing to test
            path = self._path_of_result()
            if self.trainer.is_global_zero:
                write_json(path, self._result(self._run()))
        else:
            self._test()

    def _test(self) -> None:
        checkpoint = self.trainer.checkpoint_callback
        best = getattr(checkpoint, "best_model_path", "") or None
        # Testing reads the best checkpoint, which has the state of the run when it was saved.
        run = self._run()
        if best:
            run["tested_step"] = read_checkpoint(Path(best))["global_step"]
        elif not run["diverged"]:  # else the only weights are those that diverged
            run["tested_step"] = run["steps"]
        if not run["stuck"] and "tested_step" in run:
            self.trainer.test(
                self.model, datamodule=self.datamodule, ckpt_path=best, weights_only=True
            )
        self._report(run)

    def _run(self) -> dict:
        """The result of a training as values of JSON."""
        curves = self._callbacks(Curve)
        return {
            "stuck": self.stuck,
            "ended": self.ended,
            "diverged": self.diverged,
            "steps": self.trainer.global_step,
            "seconds": next((curve.seconds for curve in curves), None),
            "curve": [point for curve in curves for point in curve.points],
        }

    def after_test(self) -> None:
        self._report({"stuck": False, "steps": self.trainer.global_step})

    def _moved_discs(self) -> dict[str, float]:
        task = self.datamodule.task
        tested = "test/accuracy" in self.trainer.callback_metrics
        if not (tested and isinstance(task, Pathfinder)):
            return {}
        # The trainer has taken the model off its device.
        classifier = self.model.classifier.to(self.trainer.strategy.root_device)
        with self.trainer.precision_plugin.forward_context():  # as in the test
            return moved_discs(classifier, task)

    def _callbacks(self, kind: type) -> list:
        return [callback for callback in self.trainer.callbacks if isinstance(callback, kind)]  # pyright: ignore[reportAttributeAccessIssue]

    def _report(self, run: dict) -> None:
        path = self._path_of_result()
        if not self.trainer.is_global_zero:
            return
        result = self._result(run)
        write_json(path, result)  # so that a run that is killed from here on has been tested
        result["moved discs"] = self._moved_discs()
        write_json(path, result)
        show(result)

    def _path_of_result(self) -> Path:
        """All processes must call this, before code that only the first one runs."""
        return folder_of(self.trainer) / RESULT

    def _result(self, run: dict) -> dict:
        task = self.datamodule.task
        return {
            "task": task.name,
            "attention": self.model.attention,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seed": self.model.seed,
            "init_from": self.model.start,
            "batch_size": self.datamodule.batch_size,
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            **run,
            **{
                name: finite_or_none(float(value))
                for name, value in self.trainer.callback_metrics.items()
            },
            "floors": floors(task),
            "environment": environment(self.trainer.strategy.root_device),
        }


def show(result: dict) -> None:
    """Prints an accuracy with its floors."""
    if result["stuck"]:
        Console().print(f"{result['task']}: stuck at chance, stopped at step {result['steps']}")
        return
    if result.get("diverged"):
        Console().print(f"{result['task']}: diverged before step {result['steps']}")
    if "test/accuracy" not in result:  # it diverged before its first checkpoint
        return
    accuracy, error = result["test/accuracy"], result["test/standard_error"]
    table = Table("", "%", "accuracy is above by", title=f"{result['task']}, test")
    table.add_row("accuracy", f"{100 * accuracy:.2f} ± {100 * error:.2f}", "")
    for name, floor in {"class prior": result["test/class_prior"], **result["floors"]}.items():
        above = f"{(accuracy - floor) / error:+.1f} standard errors" if error else ""
        table.add_row(name, f"{100 * floor:.2f}", above)
    for name, part in result["moved discs"].items():
        table.add_row(f"a disc moved: {name}", f"{100 * part:.2f}", "")
    Console().print(table)


def with_presets(arguments: list[str]) -> list[str]:
    """The arguments, each `--preset name` replaced by `--config file` for its files."""
    expanded = []
    given = iter(arguments)
    for argument in given:
        option, equals, name = argument.partition("=")
        if option == presets.OPTION:
            files = presets.files_of(name if equals else next(given, ""))
            expanded += [part for path in files for part in ("--config", str(path))]
        else:
            expanded.append(argument)
    return expanded


def check_resumed(path: Path, task: Task, attention: Expressions) -> None:
    """Checks that a run is resumed on its own task, with its own attention.

    Its curve and its best weights are of both, so a run that changes one would have a result of
    neither.

    Raises:
        ValueError: The checkpoint is of another task or of another attention.
    """
    checkpoint = read_checkpoint(path)
    # Older checkpoints do not say these.
    before = trained_by(checkpoint).get("task", task.name)
    if before != task.name:
        raise ValueError(
            f"{path} is of a run on {before}, not on {task.name}: give the options of its task, "
            "or start a new run from its weights by --model.init_from"
        )
    before = checkpoint.get(ATTENTION, attention)
    if before != attention:
        raise ValueError(
            f"{path} is of a run with the attention {before!r}, not {attention!r}: give its "
            "attention, or start a new run from its weights by --model.init_from"
        )


def check_task(arguments: list[str]) -> None:
    """Raises ValueError with the known tasks for an unknown name."""
    known = [name for name, found in vars(tasks).items() if _is_task(found)]
    for option, value in pairwise(arguments):
        if option == "--data.task" and value.isidentifier() and value not in known:
            raise ValueError(f"unknown task {value!r}; known: {', '.join(known)}")


def _is_task(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Task) and found is not Task


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the program with the message of an error about invalid or missing input."""
    try:
        yield
    except (ValueError, MissingData) as error:
        sys.exit(f"error: {error}")


def fit(
    arguments: list[str], folder: Path, trained: Callable[[bool, bool], None], test: bool
) -> None:
    """Trains one stage of several in one process, which share compiled code.

    Args:
        arguments: Options of `python -m experiments.lra fit`.
        folder: Folder of the stage.
        trained: Called after training with (whether the run reached its end, whether it was stuck
            at chance).
        test: Whether the model is tested after training.
    """
    _command(
        ["fit", *arguments],
        folder=folder,
        trained=lambda cli: trained(cli.ended, cli.stuck),
        test=test,
    )


def main() -> None:
    _command(sys.argv[1:])


def _command(arguments: list[str], **options) -> None:
    torch.set_float32_matmul_precision("high")
    with errors_in_one_line():
        check_task(arguments)
        sys.argv[1:] = with_presets(arguments)
    try:
        ArenaCLI(**options)
    except MisconfigurationException as error:  # options exclude each other
        sys.exit(f"error: {error}")
