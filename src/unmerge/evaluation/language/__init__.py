"""Judge a language model that was made to forget: TOFU's figures from one pass and its own answers."""

from unmerge.evaluation.language.answers import Answers, ask
from unmerge.evaluation.language.encoding import Encoded, encode, padded
from unmerge.evaluation.language.generation import generate
from unmerge.evaluation.language.openunlearning import read_evaluation, write_evaluation
from unmerge.evaluation.language.questions import Question, read_questions
from unmerge.evaluation.language.scoring import TokenScores, score
from unmerge.evaluation.language.tofu import Metric, metrics

__all__ = [
    "Answers",
    "Encoded",
    "Metric",
    "Question",
    "TokenScores",
    "ask",
    "encode",
    "generate",
    "metrics",
    "padded",
    "read_evaluation",
    "read_questions",
    "score",
    "write_evaluation",
]
