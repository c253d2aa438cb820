"""The public names of masks, which `import masks` finds here at their first use."""

from masks import interop
from masks._parse import parse
from masks._pattern import Pattern, block_pattern, pattern, stack
from masks.block_mask import BlockMask, DynamicMask
from masks.lookup_table import BlockLists, LookupTable
from masks.mask_batch import MaskBatch
from masks.patterns import *
from masks.serialize import from_json, load, save, to_json
