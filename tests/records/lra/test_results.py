"""Records of trained runs say what their runs gave."""

import json
from statistics import fmean, stdev

import pytest

from experiments.cli import SHIPPED
from experiments.lra import results


def test_committed_records_say_what_their_runs_gave():
    paths = list(SHIPPED.glob("lra-*.json"))
    assert paths
    for path in paths:
        record = json.loads(path.read_text())
        for label, group in record.get("groups", {}).items():
            tested = [run["test/accuracy"] for run in group["runs"] if not run["stuck"]]
            mean = pytest.approx(fmean(tested)) if tested else None
            assert group["accuracy"] == mean, (path.name, label)
            if len(tested) > 1:
                assert group["deviation"] == pytest.approx(stdev(tested)), (path.name, label)
            assert all(run["environment"]["git"]["commit"] for run in group["runs"]), path.name
            assert results.floors_of(group["runs"]).items() <= record["floors"].items()
