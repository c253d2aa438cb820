"""Compiles kernels for tests of a process that interprets them.

The compiler runs with TRITON_INTERPRET unset, so in a process of its own. That process imports
what all reports need once, and forks for each of them.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Compiler:
    """Asks for reports, which `compile_hopper` and `compile_triton` make."""

    def __init__(self):
        environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        # What a caller put in front of the installed packages stays: another Triton, for example.
        paths = (str(ROOT), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.helpers.compiler"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def reports(self, backend: str, what: str, *choices: int | str) -> list[dict]:
        """What the module of a backend reports of the kernels that it compiled."""
        print(json.dumps([backend, what, *choices]), file=self.server.stdin, flush=True)
        said = json.loads(self.server.stdout.readline())
        assert "error" not in said, said["error"]
        return said["reports"]

    def close(self) -> None:
        self.server.communicate()


def serve() -> None:
    from tests.helpers import compile_hopper, compile_triton

    modules = {"hopper": compile_hopper, "triton": compile_triton}

    def answer(backend: str, what: str, *choices: int | str) -> None:
        try:
            said = {"reports": list(modules[backend].reports(what, *choices))}
        except Exception:
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), flush=True)

    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = fork.Process(target=answer, args=json.loads(line))
        process.start()
        process.join()
        if process.exitcode:
            print(json.dumps({"error": f"exit status {process.exitcode}"}), flush=True)


if __name__ == "__main__":
    serve()
