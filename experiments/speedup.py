"""The speed-up of attention as the density s of its mask falls, forward and backward.

    python -m experiments.speedup

is `python -m experiments.bench speedup`.
"""

import sys

from experiments.bench import app
from experiments.cli import Suite

if __name__ == "__main__":
    app([Suite.SPEEDUP, *sys.argv[1:]], prog_name="python -m experiments.speedup")
