"""Does a pattern still attend to what matters, in a model of yours?

`profile` measures candidate patterns on each layer and head of a model, or on queries, keys and
values of your own; `suggest` gives every head its pattern within a budget of time. A suggestion is
{"layers": [{"heads": ["local(256)", ...]}, ...], ...}, which sparsify of
sparseflash.integrations.huggingface reads. Nothing takes N x N memory: the attention mass that a
pattern keeps is a difference of LSEs.
"""

from sparseflash.lab.capture import loss_difference
from sparseflash.lab.profiler import Profile, profile
from sparseflash.lab.suggestion import Suggestion, suggest

__all__ = ["Profile", "Suggestion", "loss_difference", "profile", "suggest"]
