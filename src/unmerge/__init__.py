"""Make a fine-tuned network forget a class or a concept by a closed-form, low-rank, reversible edit."""

from unmerge import distributed, tokens
from unmerge.collection import collect
from unmerge.composition import compose
from unmerge.diagnosis import Diagnosis, diagnose
from unmerge.edit import Edit
from unmerge.interop.checkpoints import edit_checkpoint
from unmerge.layer_edit import LayerEdit
from unmerge.moments import Moments
from unmerge.parts import plan
from unmerge.pipeline import fit
from unmerge.planning import Plan
from unmerge.recipe import Recipe
from unmerge.searching import AlphaSearch
from unmerge.statistics import Statistics
from unmerge.strength import search_alpha
from unmerge.version import VERSION as __version__

__all__ = [
    "AlphaSearch",
    "Diagnosis",
    "Edit",
    "LayerEdit",
    "Moments",
    "Plan",
    "Recipe",
    "Statistics",
    "__version__",
    "collect",
    "compose",
    "diagnose",
    "distributed",
    "edit_checkpoint",
    "fit",
    "plan",
    "search_alpha",
    "tokens",
]
