import json

import torch

from experiments.environment import environment


def test_environment_is_plain_and_complete():
    found = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert set(found) == {"date", "command", "git", "device", "hardware", "versions"}
    assert found["device"]
    assert found["hardware"]["cores"] >= 1
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["git"]["commit"] is None or len(found["git"]["commit"]) == 40
