"""Judge an unlearned model beside a retrained one: accuracy, features, membership, decodability."""

from unmerge.evaluation.passes import outputs
from unmerge.evaluation.pipeline import evaluate
from unmerge.evaluation.predictions import Outputs, SplitOutputs
from unmerge.evaluation.result import Column, Evaluation, Figure, Table

__all__ = ["Column", "Evaluation", "Figure", "Outputs", "SplitOutputs", "Table", "evaluate", "outputs"]
