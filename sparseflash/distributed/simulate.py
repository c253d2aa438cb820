"""The command `python -m sparseflash simulate` under its own module name.

python -m sparseflash.distributed.simulate "local((4095, 0))" --tokens 16M --ranks 8,64,512
"""

import typer

from sparseflash.commands.simulate import simulate

if __name__ == "__main__":
    typer.run(simulate)
