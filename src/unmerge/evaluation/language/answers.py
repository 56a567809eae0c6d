"""Everything that one model says to the questions of a benchmark, kept in one file; all figures follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unmerge.errors import FileError
from unmerge.evaluation.language.encoding import encode
from unmerge.evaluation.language.generation import NEW_TOKENS, generate
from unmerge.evaluation.language.questions import Question
from unmerge.evaluation.language.scoring import TokenScores, score
from unmerge.storage.files import read_tensors, write_tensors
from unmerge.storage.forms import check_fields

KINDS = ("answer", "paraphrase", "wrong")
Splits = Mapping[str, Sequence[Question]]
_FILE = "language answers"


@dataclass(frozen=True)
class Answers:
    """The scores of the answers of each split by kind (`KINDS`), and what the model answered itself."""

    scores: dict[str, dict[str, TokenScores]]
    generated: dict[str, list[str]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {
            f"{split}/{kind}/{name}": tensor
            for split, kinds in self.scores.items()
            for kind, scores in kinds.items()
            for name, tensor in scores.tensors().items()
        }
        write_tensors(path, tensors, _FILE, {"generated": self.generated})

    @classmethod
    def load(cls, path: Path) -> Answers:
        tensors, header = read_tensors(path, _FILE)
        columns: dict[str, dict[str, dict[str, Tensor]]] = {}
        try:
            check_fields(header, {"generated": dict[str, list[str]]})
            for key, tensor in tensors.items():
                split, kind, name = key.split("/")
                columns.setdefault(split, {}).setdefault(kind, {})[name] = tensor
            scores = {
                split: {kind: TokenScores.of(parts) for kind, parts in kinds.items()}
                for split, kinds in columns.items()
            }
        except (TypeError, ValueError) as error:
            raise FileError(f"{path} was written by another version of unmerge: {error}.") from error
        return cls(scores, header["generated"])


def ask(
    model: nn.Module,
    tokenizer: Any,
    splits: Splits,
    generated: Iterable[str] = (),
    *,
    new_tokens: int = NEW_TOKENS,
    autocast: bool = False,
    what: str = "scoring",
) -> Answers:
    """What a model says: one teacher-forced pass over all answers of all splits, and its own answers to some splits."""
    pairs: list[tuple[str, str]] = []
    owners: list[tuple[str, str]] = []
    counts: list[int] = []
    for split, questions in splits.items():
        for kind in KINDS:
            own = [(question.question, text) for question in questions for text in answers_of(question, kind)]
            if own:
                pairs += own
                owners.append((split, kind))
                counts.append(len(own))
    parts = score(model, encode(tokenizer, pairs), autocast=autocast, what=what).split(counts)
    scores: dict[str, dict[str, TokenScores]] = {}
    for (split, kind), part in zip(owners, parts, strict=True):
        scores.setdefault(split, {})[kind] = part
    # All in one call, whose batches then are full.
    chosen = {split: [question.question for question in splits[split]] for split in generated}
    asked = [text for questions in chosen.values() for text in questions]
    texts = iter(generate(model, tokenizer, asked, new_tokens=new_tokens) if asked else [])
    return Answers(scores, {split: [next(texts) for _ in questions] for split, questions in chosen.items()})


def answers_of(question: Question, kind: str) -> tuple[str, ...]:
    """The answers of one kind: one, none or several."""
    if kind == "paraphrase":
        return () if question.paraphrase is None else (question.paraphrase,)
    return (question.answer,) if kind == "answer" else question.wrong
