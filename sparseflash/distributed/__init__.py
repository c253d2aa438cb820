"""Attention over a sequence that several ranks share, planned from the mask."""

from sparseflash.distributed.attention import context_parallel_attention
from sparseflash.distributed.plan import ContextPlan, make_plan
from sparseflash.distributed.report import Report
from sparseflash.distributed.transport import gather

__all__ = ["ContextPlan", "Report", "context_parallel_attention", "gather", "make_plan"]
