"""Questions with their right and wrong answers, as TOFU's files have them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from unmerge.errors import FileError, listing


@dataclass(frozen=True)
class Question:
    """A question, its answer and, where a model is asked to choose, the answer in other words and wrong ones."""

    question: str
    answer: str
    paraphrase: str | None = None
    wrong: tuple[str, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """The questions of a .jsonl file with the entries question, answer, paraphrased_answer and perturbed_answer."""
    if not path.is_file():
        near = [entry.name for entry in sorted(path.parent.glob("*.jsonl"))]
        found = f"The folder has {listing(near)}." if near else "The folder holds no .jsonl file."
        raise FileError(f"there is no file {path}. {found}")
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            wrong = entry.get("perturbed_answer", ())
            wrong = (wrong,) if isinstance(wrong, str) else tuple(wrong)
            found_question = Question(entry["question"], entry["answer"], entry.get("paraphrased_answer"), wrong)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise FileError(
                f"{path}, line {number}: expected a JSON object with 'question' and 'answer', got {error!r}."
            ) from error
        questions.append(found_question)
    if not questions:
        raise FileError(f"{path} holds no question.")
    return questions
