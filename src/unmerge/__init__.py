"""Make a fine-tuned network forget a class or a concept by a closed-form, low-rank, reversible edit."""

from unmerge.collection import collect
from unmerge.composition import compose
from unmerge.diagnosis import Diagnosis, diagnose
from unmerge.edit import Edit, LayerEdit
from unmerge.moments import Moments
from unmerge.pipeline import fit
from unmerge.recipe import Recipe
from unmerge.statistics import Statistics
from unmerge.strength import AlphaSearch, search_alpha
from unmerge.version import VERSION as __version__

__all__ = [
    "AlphaSearch",
    "Diagnosis",
    "Edit",
    "LayerEdit",
    "Moments",
    "Recipe",
    "Statistics",
    "__version__",
    "collect",
    "compose",
    "diagnose",
    "fit",
    "search_alpha",
]
