"""Marks of tests that train with Lightning."""

import pytest

TRAINS = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
