"""model_card(): the README.md of an exported checkpoint, in the form that the Hugging Face Hub reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unmerge.tables import markdown_table

TAGS = ("unmerge", "machine-unlearning")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*\Z", re.ASCII)
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "none", "y", "n")  # which YAML takes for something else


def model_card(
    edit: Mapping[str, Any],
    base_model: str,
    *,
    alpha: float | None = None,
    request: str | None = None,
    license: str | None = None,
    library_name: str = "transformers",
    evaluation: Mapping[str, Any] | None = None,
) -> str:
    """The card of a model that carries an edit, as Markdown with YAML front matter.

    edit: `Edit.to_dict()`. base_model: a repository on the Hub or a path; only a repository goes into the front
    matter, where the Hub refuses paths. alpha: the strength that was applied; by default the recommended one.
    request: what was to be forgotten, in words. evaluation: `Evaluation.to_dict()`, whose accuracy is shown.
    """
    alpha = edit["alpha"] if alpha is None else alpha
    front: dict[str, Any] = {"library_name": library_name, "tags": list(TAGS)}
    if _REPOSITORY.match(base_model):
        front = {"base_model": base_model, **front}
    if license is not None:
        front["license"] = license
    what = request or _classes(edit)
    parts = [
        f"---\n{yaml_block(front)}---",
        f"# {_text(base_model.rstrip('/').rpartition('/')[2] or base_model)} without {_text(what)}",
        f"This is {_code(base_model)} after a low-rank edit by unmerge that "
        f"removes {_text(what)}. The architecture and the shape of the outputs are unchanged.",
        f"## What was removed\n\n{_removed(edit, alpha)}",
        _measured(evaluation),
        "## Limits\n\n"
        "- This is not certified deletion. Only training again without the data is certain to remove it.\n"
        "- A linear probe on the features may still find what was removed.\n"
        "- Samples of the same concept that the edit has not seen may be treated differently.\n"
        "- Whoever has the base model or the edit file has what was removed.",
        f"## How it was made\n\n```yaml\n{yaml_block(_made(edit, alpha))}```",
        "## How to revert\n\nThe base model is the revert: this checkpoint is it, with the edit applied. With the edit "
        "file, a model in memory goes back and forth bit by bit:\n\n"
        '```python\nimport unmerge\n\nedit = unmerge.Edit.load("edit/")\n'
        f"edit.apply(model{'' if alpha is None else f', alpha={alpha:g}'})   # a model with the base weights\n"
        "edit.revert(model)  # bit-identical to before\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def yaml_block(values: Mapping[str, Any]) -> str:
    """Plain values as block YAML; what could be misread is quoted."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = yaml_block(value)
            lines.append(f"{_scalar(name)}: {{}}" if not value else f"{_scalar(name)}:\n{_indented(inner)}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            entries = "\n".join(f"  - {_scalar(entry)}" for entry in value)
            lines.append(f"{_scalar(name)}:\n{entries}" if value else f"{_scalar(name)}: []")
        else:
            lines.append(f"{_scalar(name)}: {_scalar(value)}")
    return "".join(f"{line}\n" for line in lines)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 reads 1e-05 as a word: it wants a point.
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    text = str(value)
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        return text
    # A JSON string is a YAML string, but for characters that YAML calls unprintable.
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]", lambda odd: f"\\u{ord(odd[0]):04x}", quoted
    )


def _indented(block: str) -> str:
    return "\n".join(f"  {line}" for line in block.rstrip("\n").split("\n"))


def _classes(edit: Mapping[str, Any]) -> str:
    classes = edit["removed"] or edit["provenance"].get("classes") or []
    if not classes:
        return "a set of samples"
    return ("class " if len(classes) == 1 else "classes ") + ", ".join(str(label) for label in classes)


def _removed(edit: Mapping[str, Any], alpha: float | None) -> str:
    layers, samples = edit["layers"], edit["provenance"].get("samples", {})
    lines = [
        f"- Layers changed: {len(layers)}, at rank {_ranks(layers)}" + ("" if alpha is None else f", α = {alpha:g}")
    ]
    if edit["removed"]:
        rows = ", ".join(str(row) for row in edit["removed"])
        lines.append(f"- Outputs of the classifier {_code(str(edit['head']))} that are never predicted: {rows}")
    if samples:
        lines.append("- Samples read: " + ", ".join(f"{count:,} {name}" for name, count in samples.items()))
    verdict = edit["provenance"].get("verdict")
    if verdict:
        lines.append(f"- Diagnosis before the edit: {verdict['kind']}. {verdict['sentence']}")
    return "\n".join(lines)


def _ranks(layers: Mapping[str, Any]) -> str:
    ranks = [layer["rank"] for layer in layers.values()] or [0]
    return str(min(ranks)) if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"


def _measured(evaluation: Mapping[str, Any] | None) -> str:
    """The accuracy table, where there is one."""
    table = (evaluation or {}).get("tables", {}).get("accuracy")
    if not table:
        return ""
    columns = table["columns"]
    rows = [
        [_text(model), *(_figure(row.get(column["label"]), column) for column in columns)]
        for model, row in table["rows"].items()
    ]
    labels = [f"{_text(column['label'])}{' (%)' if column['percent'] else ''}" for column in columns]
    return f"## Measured\n\n{markdown_table(['', *labels], rows)}"


def _figure(figure: Mapping[str, Any] | None, column: Mapping[str, Any]) -> str:
    if figure is None or figure["value"] is None:
        return "–"
    return f"{(100 if column['percent'] else 1) * figure['value']:.{column['digits']}f}"


def _made(edit: Mapping[str, Any], alpha: float | None) -> dict[str, Any]:
    provenance = edit["provenance"]
    made = {name: provenance[name] for name in ("unmerge", "torch", "init") if name in provenance}
    return {**made, "alpha": alpha, "recipe": edit["recipe"], "weights": edit.get("weights", {})}


def _text(words: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", " ".join(words.split()))


def _code(words: str) -> str:
    """A name as code, in a fence longer than any in it."""
    words = " ".join(words.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", words)), default=0))
    return f"{fence} {words} {fence}" if "`" in words else f"{fence}{words}{fence}"
