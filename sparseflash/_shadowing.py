"""Checks that `import masks` finds the package of sparseflash, not a folder of the user."""

from importlib.util import find_spec
from pathlib import Path

OURS = Path(__file__).parents[1] / "masks"


def check_masks() -> None:
    """Checks which module `masks` Python finds, without running it.

    Raises:
        ImportError: Python finds another module or folder of this name; the message names it.
    """
    try:
        spec = find_spec("masks")
    except ValueError:  # a module that was made by hand
        spec = None
    found = list(spec.submodule_search_locations or [spec.origin]) if spec else ["nowhere"]
    if spec and spec.origin and Path(spec.origin).resolve().parent == OURS.resolve():
        return
    raise ImportError(
        f"sparseflash needs its own package 'masks', {OURS}, but Python finds {found[0]} "
        "under this name: rename that, or start Python in another folder"
    )
