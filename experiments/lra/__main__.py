"""Training and testing on Long Range Arena and Path-X.

    python -m experiments.lra fit --preset nystromformer/listops --model.encoder.attention flash
    python -m experiments.lra fit --preset nystromformer/listops --ckpt_path runs/.../last.ckpt
    python -m experiments.lra test --preset nystromformer/listops --ckpt_path runs/.../best.ckpt

A preset is a file in presets/, which is read after the files common.yaml of its folders. Options
override the values of a preset.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

OPTIONS = {
    "--preset NAME": "a configuration, see below; --print_config shows it",
    "--ckpt_path FILE": "fit: resume from this checkpoint; test: test this model",
    "--seed_everything N": "seed of weights, order of samples and dropout",
    "--model.encoder.attention E": "standard, flash, sdpa, linear, nystromformer, performer, "
    "linformer, reformer, a pattern that `python -m masks` reads, or a list for layers and heads",
    "--model.encoder.NAME V": "block_size, layers, dim, heads, feedforward, positions, pool, "
    "dropout, order, tile, mask_black: see EncoderConfig in model.py",
    "--model.optimizer.NAME V": "learning_rate, betas, weight_decay, warmup_steps, schedule: see "
    "OptimizerConfig in learner.py",
    "--model.objective.NAME V": "labels, pixels, traces, hidden, ink: weights of the losses",
    "--model.init_from FILE": "start with the weights of this checkpoint",
    "--model.passes P": "eager, compiled or cuda_graph",
    "--data.task T": "ListOps, Text, Retrieval, FilmPairs, ImageTask, Pathfinder or Synthetic, "
    "with options --data.task.init_args.NAME V",
    "--data.NAME V": "data_root, batch_size, workers",
    "--trainer.NAME V": "max_steps, val_check_interval, precision, devices, default_root_dir, ...",
    "--deadline.at T": "stop at this time (seconds since 1970) and test; the run can be resumed",
    "--enough.accuracy A": "stop at this validation accuracy; --enough.patience N: stop after N "
    "validations without a better one",
    "--help-all": "every option, with those of Lightning",
}


def print_help() -> None:
    """Prints what the command takes, without the seconds that its imports take."""
    from rich.console import Console
    from rich.table import Table

    folder = Path(__file__).parent / "presets"
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    presets = sorted(str(path) for path in files if path.name != "common")
    table = Table(box=None, show_header=False, padding=(0, 2))
    for option, text in OPTIONS.items():
        table.add_row(option, text)
    console = Console(markup=False, highlight=False)
    print(__doc__)
    console.print(table, "", f"Presets: {', '.join(presets)}", sep="\n")


def main() -> None:
    """Runs the command line, or prints its help."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print_help()
        return
    if "--help-all" in arguments:
        given = [argument for argument in arguments if argument != "--help-all"]
        sys.argv[1:] = [*(given or ["fit"]), "--help"]
    if find_spec("lightning") is None:
        sys.exit("training needs lightning: pip install -e '.[lra]'")
    from experiments.lra import command

    command.main()


if __name__ == "__main__":
    main()
