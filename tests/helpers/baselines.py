"""Attention of other packages, which the extra lra-baselines installs."""

import pytest

MODULES = {
    "nystromformer": "nystrom_attention",
    "performer": "performer_pytorch",
    "linformer": "linformer",
    "reformer": "transformers",
    "local-attention": "local_attention",
    "longformer": "transformers",
    "bigbird": "transformers",
    "routing": "routing_transformer",
    "sinkhorn": "sinkhorn_transformer",
}


def need_package(attention: str) -> None:
    """Skips a test of an attention of a package that is not installed."""
    pytest.importorskip(MODULES.get(attention, "torch"), reason="an optional extra, lra-baselines")
