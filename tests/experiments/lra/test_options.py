"""The options of a folder of runs."""

import pytest

from experiments.cli import ROOT
from experiments.lra.options import check_options, that_determine


def test_files_of_the_package_are_the_same_in_every_checkout():
    inside = ROOT / "experiments" / "lra" / "presets" / "common.yaml"
    found = that_determine([f"--config={inside}", "--config", "/elsewhere/own.yaml"])
    assert found == [
        "--config=experiments/lra/presets/common.yaml",
        "--config=/elsewhere/own.yaml",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--dim", "32", "--config=a"], r"--dim was 16 and is 32 now; give the recorded"),
        (["--dim=16"], r"--config was a and is not given now;"),
        (
            ["--dim=16", "--config=a", "--config=b", "--layers=2"],
            r"--config was a and is a, b now, --layers was not given and is 2 now;",
        ),
        (["--config=a", "--dim=16"], r"their order was --dim=16 --config=a;"),
    ],
)
def test_options_that_differ_are_named_with_both_values(given, message, tmp_path):
    first = ["--dim=16", "--config=a", "--data.workers=1"]
    check_options(tmp_path, first, started=False)
    check_options(tmp_path, ["--dim", "16", "--config", "a"], started=True)
    with pytest.raises(ValueError, match=message):
        check_options(tmp_path, given, started=True)
    check_options(tmp_path, given, started=False)  # nothing was trained with the first ones
    check_options(tmp_path, given, started=True)
