"""Which samples to forget and which to keep, from the flags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli.data import source_of
from unmerge.cli.images import preprocessing_of
from unmerge.cli.language import SUFFIX, TextOptions, Texts, tokenizer_of
from unmerge.cli.models import Loaded
from unmerge.cli.parts import Filtered, Part, Source
from unmerge.cli.picking import label_of, read_places, span
from unmerge.data.batches import Mask
from unmerge.errors import DataError, listing

PANEL = "Data"
FORGOTTEN = "What to forget"
_FILES = (SUFFIX, ".npz")


@dataclass(frozen=True)
class SourceOptions(TextOptions):
    """Where data come from, and how they are prepared."""

    data: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="All data: a folder of images with a subfolder a class, an .npz (images or inputs, labels), a Hugging "
            "Face dataset on disk (DIR or DIR#split), a .jsonl of texts (question and answer, or text), or "
            "package.module:function that returns a loader.",
            rich_help_panel=PANEL,
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Samples a batch.", rich_help_panel=PANEL)] = 64
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Threads that decode images.", rich_help_panel=PANEL)
    ] = 4
    image_size: Annotated[
        str | None, typer.Option(metavar="N or HxW", help="Resize images to this size.", rich_help_panel=PANEL)
    ] = None
    pixel_mean: Annotated[
        str | None,
        typer.Option(metavar="X,Y,Z", help="Subtracted from pixels, which are 0 to 1.", rich_help_panel=PANEL),
    ] = None
    pixel_std: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,Z",
            help="Divides them then. Without these flags a Hugging Face directory's preprocessor_config.json holds.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def size(self) -> tuple[int, int] | None:
        if self.image_size is None:
            return None
        height, _, width = self.image_size.lower().partition("x")
        if not (height.isdecimal() and (width or height).isdecimal() and int(height) and int(width or height)):
            raise typer.BadParameter(f"--image-size {self.image_size!r} is not of the form 224 or 224x160.")
        return int(height), int(width or height)

    def numbers(self, name: str) -> tuple[float, ...]:
        given = getattr(self, name)
        try:
            return () if given is None else tuple(float(value) for value in given.split(","))
        except ValueError as error:
            flag = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{flag} {given!r} is not of the form 0.5 or 0.485,0.456,0.406.") from error


@dataclass(frozen=True)
class DataOptions(SourceOptions):
    """Which of the data are to be forgotten."""

    forget: Annotated[
        str | None,
        typer.Option(
            metavar="label=A,B",
            help="Forget these classes, by number or name; of a .jsonl the records with ENTRY=A,B. A FILE.jsonl or "
            "FILE.npz here is --forget-data FILE.",
            rich_help_panel=FORGOTTEN,
        ),
    ] = None
    forget_ids: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Forget the samples with these numbers, one a line.", rich_help_panel=FORGOTTEN
        ),
    ] = None
    forget_data: Annotated[
        str | None, typer.Option(metavar="SRC", help="Forget all of this source.", rich_help_panel=FORGOTTEN)
    ] = None
    retain_data: Annotated[
        str | None,
        typer.Option(
            "--retain-data", "--retain", metavar="SRC", help="Retain all of this source.", rich_help_panel=FORGOTTEN
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.forget is not None and self.forget_data is None and self.forget.endswith(_FILES):
            object.__setattr__(self, "forget_data", self.forget)
            object.__setattr__(self, "forget", None)

    def check(self) -> None:
        """Refuse what does not go together, before anything is loaded."""
        ways = [name for name in ("forget", "forget_ids", "forget_data") if getattr(self, name) is not None]
        flags = {"forget": "--forget", "forget_ids": "--forget-ids", "forget_data": "--forget-data"}
        if len(ways) > 1:
            raise typer.BadParameter(f"{' and '.join(flags[way] for way in ways)} each say what to forget; give one.")
        if not ways:
            raise typer.BadParameter(
                'say what to forget: --forget "label=3,5", --forget-ids FILE or --forget-data SRC.'
            )
        if self.forget is not None:
            self.wanted()
        if self.forget_data is None and self.data is None:
            raise typer.BadParameter(f"{flags[ways[0]]} picks samples out of --data SRC, which is missing.")
        if self.forget_data is None and self.retain_data is not None:
            raise typer.BadParameter(
                f"--retain-data goes with --forget-data; {flags[ways[0]]} retains the rest of --data."
            )
        if self.forget_data is not None and (self.data is not None or self.retain_data is None):
            found = "which is missing" if self.data is None else "and not with --data"
            raise typer.BadParameter(f"--forget-data SRC goes with --retain-data SRC, {found}.")
        self.counted()
        self.size()
        for name in ("pixel_mean", "pixel_std"):
            self.numbers(name)

    def wanted(self) -> tuple[str, list[str]]:
        """The entry, "label" but for texts, and the values of --forget as they were typed."""
        assert self.forget is not None
        key, equals, values = self.forget.partition("=")
        found = [value.strip() for value in values.split(",")]
        is_known = key.strip() == "label" or (self.data or "").endswith(SUFFIX)
        if not equals and self.data is None and Path(key).exists():
            raise typer.BadParameter(f"--forget {key}: to forget all of it type --forget-data {key} --retain-data SRC.")
        if not is_known or not equals or not all(found):
            value = values if equals else key
            is_other = bool(value) and key.strip() != "label" and ":" not in key
            hint = f" Did you mean --forget label={value}?" if is_other else ""
            raise typer.BadParameter(
                f"--forget {self.forget!r} is not of the form label=3 or label=3,5 or label=cat.{hint}"
            )
        return key.strip(), list(dict.fromkeys(found))


@dataclass(frozen=True)
class Requested:
    """Batches to forget and to retain, and what to call them."""

    forget: Any
    retain: Any
    description: str
    names: dict[int, str] = field(default_factory=dict)
    identity: str | None = None  # of all the data, for what was collected from it before
    mask: Mask = None  # which tokens of a text count

    @property
    def is_text(self) -> bool:
        return isinstance(getattr(self.forget, "source", None), Texts)


def requested(options: DataOptions, model: Loaded) -> Requested:
    """The two parts that the flags name; the sources are opened, no batch is read."""
    options.check()
    return replace(_parts(options, model), mask=options.counted())


def _parts(options: DataOptions, model: Loaded) -> Requested:
    if options.forget_data is not None:
        assert options.retain_data is not None
        forget, retain = (opened(source, options, model) for source in (options.forget_data, options.retain_data))
        names = model.names or _names(forget) or _names(retain)
        identities = [getattr(source, "identity", None) for source in (forget, retain)]
        return Requested(
            all_of(forget, options.batch_size),
            all_of(retain, options.batch_size),
            f"all of {options.forget_data}",
            names,
            " ".join(map(str, identities)) if all(identities) else None,
        )
    assert options.data is not None
    source = opened(options.data, options, model)
    names = model.names or _names(source)
    if options.forget is not None:
        return _by_label(options, source, names)
    return _by_place(options, source, names)


def opened(reference: str, options: SourceOptions, model: Loaded) -> Source | Iterable[Any]:
    """A source, with its images or texts prepared for the model."""
    if reference.endswith(SUFFIX):
        return Texts(Path(reference).expanduser(), tokenizer_of(model, options.tokenizer), options)
    prepare = preprocessing_of(
        model.module, model.directory, options.size(), options.numbers("pixel_mean"), options.numbers("pixel_std")
    )
    return source_of(reference, prepare, model.names, options.workers)


def all_of(source: Any, batch_size: int) -> Any:
    return Part(source, range(len(source)), batch_size) if isinstance(source, Source) else source


def _names(source: Any) -> dict[int, str]:
    return dict(getattr(source, "names", {}) or {})


def _by_label(options: DataOptions, source: Any, names: dict[int, str]) -> Requested:
    entry, values = options.wanted()
    if isinstance(source, Texts):
        places = set(source.places_with(entry, values))
        return _split(options, source, places, f"{entry} {', '.join(values)} of {options.data}", names)
    wanted = [label_of(value, names) for value in values]
    shown = ", ".join(names.get(label, str(label)) for label in wanted)
    description = f"{'class' if len(wanted) == 1 else 'classes'} {shown} of {options.data}"
    if not isinstance(source, Source):
        return Requested(Filtered(source, wanted, True), Filtered(source, wanted, False), description, names)
    labels = source.known_labels(str(options.data)).tolist()
    present = sorted(set(labels))
    absent = [label for label in wanted if label not in present]
    if absent:
        raise DataError(
            f"no sample of {options.data} has the label {listing(map(str, absent))}; there are {span(present)}."
        )
    places = {place for place, label in enumerate(labels) if label in set(wanted)}
    return _split(options, source, places, description, names)


def _by_place(options: DataOptions, source: Any, names: dict[int, str]) -> Requested:
    path = options.forget_ids
    assert path is not None
    if not isinstance(source, Source):
        raise DataError("--forget-ids needs data with numbered samples: an .npz, a .jsonl, a folder or a dataset.")
    places = read_places(path, len(source))
    return _split(options, source, places, f"{len(places)} samples of {options.data}", names)


def _split(
    options: DataOptions, source: Source, places: set[int], description: str, names: dict[int, str]
) -> Requested:
    """Some samples of a source to forget, the others to retain."""
    if len(places) == len(source):
        named = f"--forget {options.forget}" if options.forget is not None else str(options.forget_ids)
        raise DataError(f"{named} names every sample of {options.data}, so nothing is left to retain.")
    rest = [place for place in range(len(source)) if place not in places]
    forget, retain = (Part(source, chosen, options.batch_size) for chosen in (sorted(places), rest))
    return Requested(forget, retain, description, names, source.identity)
