"""Selects patterns for a trained model by the attention mass that they cover.

`profile` measures candidate patterns on each layer and head of a model, or on given queries, keys
and values. `suggest` selects a pattern for every head, within a budget of time. A suggestion is
{"layers": [{"heads": ["local(256)", ...]}, ...], ...}, which sparsify of
sparseflash.integrations.huggingface reads.

No N x N memory is needed: the attention mass in a pattern follows from the difference of two LSEs.
"""

from sparseflash.lab.capture import loss_difference
from sparseflash.lab.profiler import Profile, profile
from sparseflash.lab.suggestion import Suggestion, suggest

__all__ = ["Profile", "Suggestion", "loss_difference", "profile", "suggest"]
