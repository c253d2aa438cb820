"""Attention over a sequence that several ranks share, planned from the mask."""

from sparseflash.distributed.plan import ContextPlan, make_plan
from sparseflash.distributed.report import Report

__all__ = ["ContextPlan", "Report", "make_plan"]
