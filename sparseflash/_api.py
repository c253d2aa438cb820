"""The public names of sparseflash, which `import sparseflash` finds here at their first use."""

from sparseflash import nn
from sparseflash._attention import attention
from sparseflash._block_mass import block_mass
from sparseflash._explain import Explanation, explain
from sparseflash._warmup import warmup
from sparseflash.backends.base import BackendError
from sparseflash.bias import alibi, relative_bias
from sparseflash.compiled import clear_cache
from sparseflash.merge import merge_attention
from sparseflash.options import AttentionOptions
from sparseflash.score import ScoreFunction
from sparseflash.varlen import attention_varlen, pad, unpad
