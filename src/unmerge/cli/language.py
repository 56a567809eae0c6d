"""Texts for a language model: a .jsonl of questions with answers or of plain texts, and how they become tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmerge import tokens as encoding
from unmerge.cli.models import Loaded, transformers
from unmerge.cli.parts import Source
from unmerge.data.batches import Mask
from unmerge.errors import DataError, FileError, listing, suggest

PANEL = "Text"
SUFFIX = ".jsonl"
SUBJECT = "subject"  # the entry of a record that names what it is about
COUNTED: dict[str, Mask] = {"all": None, "answer": encoding.answer, "subject": SUBJECT}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TextOptions:
    """How texts become tokens, and which of these count."""

    tokens: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="The tokens whose inputs the edit is made from: all (question and answer), answer, or subject (where "
            "the record's entry 'subject' occurs in its text).",
            rich_help_panel=PANEL,
        ),
    ] = "all"
    template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help=r"In place of the chat template: 'Question: {question}\nAnswer: {answer}'.",
            rich_help_panel=PANEL,
        ),
    ] = None
    group: Annotated[
        str | None,
        typer.Option(
            metavar="ENTRY",
            help="The entry with a whole number, such as an author's, that is the class of all the record's tokens.",
            rich_help_panel=PANEL,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Tokens a text. By default the tokenizer's.", rich_help_panel=PANEL),
    ] = None
    truncate: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", help="Cut longer texts at their start or end; else they are refused.", rich_help_panel=PANEL
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="By default the one in the model's directory.", rich_help_panel=PANEL),
    ] = None

    def counted(self) -> Mask:
        """The mask of the tokens that count."""
        if self.tokens not in COUNTED:
            raise typer.BadParameter(f"--tokens {self.tokens!r}. {suggest(self.tokens, COUNTED)}")
        return COUNTED[self.tokens]


class Texts(Source):
    """The records of a .jsonl file as tokens."""

    def __init__(self, path: Path, tokenizer: Any, options: TextOptions) -> None:
        self.path, self.records, self.names = path, read_records(path), {}
        self.tokenizer = tokenizer
        try:
            self._encoded = encoding.encode(
                tokenizer,
                self.records,
                # A shell hands over the two characters \ and n.
                template=None if options.template is None else options.template.replace("\\n", "\n"),
                group=options.group,
                subject=SUBJECT if options.tokens == "subject" else None,
                max_length=options.max_length,
                truncate=options.truncate,
                batch_size=1,
            )
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._padding = {"input_ids": padding, "labels": encoding.IGNORED}
        self.identity = _hash(self._encoded, options.tokens)

    def __len__(self) -> int:
        return len(self._encoded)

    def inputs(self, places: Sequence[int]) -> dict[str, Tensor]:
        rows = [self._encoded[place] for place in places]
        return {name: _stacked([row[name] for row in rows], self._padding.get(name, 0)) for name in rows[0]}

    def places_with(self, entry: str, values: Sequence[str]) -> list[int]:
        """The records whose entry has one of some values."""
        found = [str(record[entry]) if entry in record else None for record in self.records]
        known = sorted({value for value in found if value is not None}, key=lambda value: (len(value), value))
        if not known:
            raise DataError(
                f"no record of {self.path} has an entry {entry!r}; the first has {listing(self.records[0])}."
            )
        absent = [value for value in values if value not in known]
        if absent:
            raise DataError(f"no record of {self.path} has {entry}={absent[0]}; there are {listing(known)}.")
        return [place for place, value in enumerate(found) if value in values]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, one a line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no text: expected one JSON object a line.") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise FileError(f"{path}, line {number}: not JSON ({error}). Expected one object a line.") from error
        if not isinstance(record, dict):
            raise FileError(
                f"{path}, line {number}: expected an object with 'question' and 'answer', or with 'text', not a "
                f"{type(record).__name__}."
            )
        records.append(record)
    if not records:
        raise DataError(f"{path} holds no record: expected one JSON object a line.")
    return records


def tokenizer_of(model: Loaded, given: Path | None) -> Any:
    """The tokenizer that was named, else the one beside the model's weights, else beside its adapter's base."""
    places = [given] if given is not None else [model.directory, model.base]
    known = [place for place in places if place is not None]
    place = next((place for place in known if any((place / name).is_file() for name in _TOKENIZER)), None)
    if place is None:
        where = f"{listing(map(str, known))} has none" if known else f"{model.reference} is no directory that has one"
        raise FileError(f"texts need a tokenizer, and {where} ({listing(_TOKENIZER)}). Pass --tokenizer DIR.")
    try:
        return transformers().AutoTokenizer.from_pretrained(place, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a damaged directory
        raise FileError(f"{place} cannot be read as a tokenizer: {error}") from error


def _stacked(rows: list[Tensor], padding: int) -> Tensor:
    """Entries of single records as one tensor, tokens padded on the right."""
    if rows[0].dim() == 1:
        return torch.cat(rows)
    return pad_sequence([row[0] for row in rows], batch_first=True, padding_value=padding)


def _hash(encoded: Sequence[Mapping[str, Tensor]], counted: str) -> str:
    """A checksum of all that a pass over the texts depends on."""
    found = hashlib.sha256(counted.encode())
    for record in encoded:
        for name, value in record.items():
            found.update(f"{name}{tuple(value.shape)}".encode() + value.numpy().tobytes())
    return found.hexdigest()
