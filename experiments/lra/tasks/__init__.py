"""The tasks of Long Range Arena, one in each file."""

from experiments.lra.tasks.films import FilmPairs
from experiments.lra.tasks.image import ImageTask
from experiments.lra.tasks.listops import ListOps
from experiments.lra.tasks.pathfinder import Pathfinder
from experiments.lra.tasks.retrieval import Retrieval
from experiments.lra.tasks.synthetic import Synthetic
from experiments.lra.tasks.task import (
    SPLITS,
    Batch,
    MissingData,
    Sample,
    Samples,
    Shape,
    Task,
    collate,
)
from experiments.lra.tasks.text import Text

__all__ = [
    "SPLITS",
    "Batch",
    "FilmPairs",
    "ImageTask",
    "ListOps",
    "MissingData",
    "Pathfinder",
    "Retrieval",
    "Sample",
    "Samples",
    "Shape",
    "Synthetic",
    "Task",
    "Text",
    "collate",
]
