"""The parser of the command line: an error is printed in a few lines, without the usage."""

import re
from difflib import get_close_matches
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from experiments.lra import presets

HELP = "help: `python -m experiments.lra --help`, or `--help-all` for every option"
UNKNOWN_OPTION = r"unrecognized arguments: (.*)"  # of the command line
UNKNOWN_NAME = r"Option '(.*)' is not accepted"  # of a class, such as a task


class Parser(LightningArgumentParser):
    """Lightning's parser. It names the options that are like an unknown one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints an error and where help is, and ends the program with status 2."""
        if found := re.fullmatch(UNKNOWN_OPTION, message, re.DOTALL):
            options = [part for part in found[1].split() if part.startswith("--")]
            message = "; ".join(map(self._unknown, options)) or message
        elif found := re.fullmatch(UNKNOWN_NAME, message):
            message = f"{message}; known: {', '.join(sorted(self.get_defaults().keys()))}"
        if not self.exit_on_error:  # an inner parser, whose error is part of that of another one
            super().error(message, ex)
        self.exit(2, f"error: {message}\n{HELP}\n")

    def _unknown(self, option: str) -> str:
        """What is wrong with an unknown option, and which ones may be meant."""
        name = option.partition("=")[0]
        keys = self.get_defaults().keys()
        similar = similar_options(name, [presets.OPTION, *(f"--{key}" for key in keys)])
        return f"unknown option {name}" + (f"; similar: {', '.join(similar)}" if similar else "")


def similar_options(name: str, known: list[str]) -> list[str]:
    """Options that are spelt like `name`, or whose last part is: --data.workers for --worker."""
    ends = {option.rpartition(".")[2]: option for option in reversed(known)}
    of_end = get_close_matches(name.lstrip("-").rpartition(".")[2], ends, 2, 0.8)
    whole = get_close_matches(name, known, 2, 0.85)
    return list(dict.fromkeys([*whole, *(ends[end] for end in of_end)]))
