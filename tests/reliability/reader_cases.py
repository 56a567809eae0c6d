"""Every reader of the package with something good for it to read, and what a caller then does with the result."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import unmerge
from unmerge.cli import apply, edits, exports, recipes, run_directory
from unmerge.cli.recipes import RecipeFlags
from unmerge.collecting.merging import Shard, merge, save_shard
from unmerge.editing.searching import AlphaSearch, Point
from unmerge.evaluation.language import Answers, TokenScores
from unmerge.evaluation.predictions import Outputs, SplitOutputs, check
from unmerge.interop.card import model_card
from unmerge.interop.shards import Checkpoint
from unmerge.model.initial import initial_weights
from unmerge.report import page

ADAPTED = "base_model.model.0"


@dataclass(frozen=True)
class Case:
    """A file of a directory, and the reading of the directory."""

    name: str
    file: str
    read: Callable[[Path], object]
    kind: str | None = None  # of a sealed safetensors file, whose header is fuzzed under a true seal


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    labels = torch.arange(30) % 3
    return [(torch.randn(30, 5) + labels[:, None], labels)]


def write_all(place: Path) -> None:
    """One directory with a good file for every reader."""
    network, batches = model(), data()
    statistics = unmerge.collect(network, batches, per_class="full", sample=4)
    save_shard(statistics, Shard(1, 1, "data", "full"), place / "statistics.safetensors")
    edit = unmerge.fit(network, classes=[1], statistics=statistics, init="zero", on_verdict="ignore")
    edit.save(place / "edit")
    plain = unmerge.Recipe(mean="free", head="edit", alpha=1.0)
    unmerge.fit(network, classes=[1], statistics=statistics, recipe=plain, init="zero", on_verdict="ignore").to_peft(
        place / "own"
    )
    _write_foreign_adapter(place / "lora")
    ones = torch.ones(4, dtype=torch.int64)
    split = SplitOutputs(torch.randn(4, 3), ones, ones, torch.randn(2, 6), ones[:2])
    Outputs({"forget": split, "test": split}, "2:input").save(place / "outputs.safetensors")
    (place / "recipe.yaml").write_text("basis: lda\nrank: 4\nlayers: [0, re:2]\nalpha: null\n".replace("[0,", "['0',"))
    _write_checkpoint(place / "checkpoint", network)
    applied = place / "applied"
    applied.mkdir()
    tensors = exports.checksums(network.state_dict())
    base = {"reference": "tiny_models:build", "directory": None, "weights": "w", "tensors": tensors}
    record = {"base": {**base, "checksum": exports.checksum(tensors)}}
    (applied / exports.APPLIED).write_text(json.dumps(record))
    _write_run(place / "run", edit, statistics)
    scores = TokenScores(torch.tensor([2, 3]), *(torch.randn(5) for _ in range(4)))
    Answers({"forget": {"answer": scores}}, {"forget": ["a", "b"]}).save(place / "answers.safetensors")


def _write_run(directory: Path, edit: unmerge.Edit, statistics: unmerge.Statistics) -> None:
    """What `unmerge run` writes, as far as other commands read it."""
    edit.save(directory / "edit")
    forget = unmerge.collect(model(), [(inputs[labels == 1], labels[labels == 1]) for inputs, labels in data()])
    kept = unmerge.collect(model(), [(inputs[labels != 1], labels[labels != 1]) for inputs, labels in data()])
    unmerge.diagnose(forget, kept, model(), "zero").to_json(directory / "diagnosis.json")
    edits.write_norms(directory, {"0.bias": torch.ones(6)}, edit.alpha)
    accuracy = {"forget": 0.9, "retain": 0.8}
    run = {
        "command": "unmerge run", "model": "tiny", "init": "zero", "request": "class 1", "alpha": 1.0,
        "accuracy": {"before": accuracy, "after": accuracy}, "versions": {"unmerge": "1"}, "created": "today",
        "seconds": {"edit": 1.0}, "samples": [], "inputs": {"data": "x", "layers": {}},
    }  # fmt: skip
    search = AlphaSearch(1.0, [Point(0.0, 0.9, 0.8), Point(1.0, 0.0, 0.8)], "target", 0.01, True, "target")
    for name, value in (("run", run), ("curve", [{"alpha": 1.0, **accuracy}]), ("alpha", search.to_dict())):
        (directory / f"{name}.json").write_text(json.dumps(value))


def _write_foreign_adapter(directory: Path) -> None:
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {r".*\.?0": 2}, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    parts = {f"{ADAPTED}.lora_A.weight": torch.randn(2, 5), f"{ADAPTED}.lora_B.weight": torch.randn(6, 2)}
    save_file(parts, directory / "adapter_model.safetensors")


def _write_checkpoint(directory: Path, network: nn.Module) -> None:
    directory.mkdir()
    places = {}
    for number, (name, tensor) in enumerate(network.state_dict().items(), 1):
        places[name] = f"model-{number:05}-of-00004.safetensors"
        save_file({name: tensor + 1}, directory / places[name])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def use_edit(edit: unmerge.Edit) -> None:
    assert repr(edit)
    assert edit._repr_html_()
    assert model_card(edit.to_dict(), "base", alpha=edit.alpha)
    edit.apply(copy.deepcopy(model()), 1.0, force=True)


def use_statistics(found: unmerge.Statistics) -> None:
    assert repr(found)
    assert found.probe
    both = found + found
    assert (both - found).samples == found.samples
    unmerge.fit(model(), classes=[1], statistics=found, init="zero", on_verdict="ignore")


def _read_edit(place: Path) -> None:
    use_edit(unmerge.Edit.load(place / "edit"))


def _read_statistics(place: Path) -> None:
    merge([place / "statistics.safetensors"])
    use_statistics(unmerge.Statistics.load(place / "statistics.safetensors"))


def _read_outputs(place: Path) -> None:
    found = Outputs.load(place / "outputs.safetensors")
    check(found, "fuzzed")
    for split in found.splits.values():
        split.reordered(torch.arange(len(split)))


def _read_recipe(place: Path) -> None:
    recipe = recipes.recipe_of(RecipeFlags(), place / "recipe.yaml")
    assert unmerge.Recipe.from_dict(recipe.to_dict()) == recipe


def _read_checkpoint(place: Path) -> None:
    found = Checkpoint.of(place / "checkpoint")
    assert all(isinstance(found[name], Tensor) for name in found)


def _read_initial(place: Path) -> None:
    initial_weights(model(), place / "checkpoint", model().state_dict())


def _read_own_adapter(place: Path) -> None:
    use_edit(unmerge.Edit.from_peft(place / "own"))


def _read_adapter(place: Path) -> None:
    use_edit(unmerge.Edit.from_peft(place / "lora"))
    unmerge.Edit.from_peft(place / "lora", model())


def _read_record(place: Path) -> None:
    record: dict[str, Any] = exports.read_record(place / "applied")
    assert isinstance(record["base"]["reference"], str)


def _read_norms(place: Path) -> None:
    edits.apply(place / "run", model())


def _read_answers(place: Path) -> None:
    found = Answers.load(place / "answers.safetensors")
    for kinds in found.scores.values():
        for scores in kinds.values():
            assert len(scores.probabilities) == len(scores)


def _read_run(place: Path) -> None:
    """The page of a run, a model card, and what a later run starts from."""
    directory = place / "run"
    run_directory.known_statistics(directory, {"data": "x", "layers": {}})
    edit = unmerge.Edit.load(directory / "edit")
    written = apply.card_of(directory, edit, "tiny", is_directory=False, alpha=1.0)
    assert written.startswith("---")
    assert "</html>" in page.rendered(directory)


INDEX = "checkpoint/model.safetensors.index.json"
CASES = [
    Case("edit", "edit/edit.safetensors", _read_edit, "edit"),
    Case("readable-edit", "edit/edit.json", _read_edit),
    Case("statistics", "statistics.safetensors", _read_statistics, "statistics"),
    Case("outputs", "outputs.safetensors", _read_outputs, "evaluation outputs"),
    Case("recipe", "recipe.yaml", _read_recipe),
    Case("index", INDEX, _read_checkpoint),
    Case("initial-index", INDEX, _read_initial),
    Case("shard", "checkpoint/model-00002-of-00004.safetensors", _read_checkpoint),
    Case("own-adapter", "own/adapter_model.safetensors", _read_own_adapter, "adapter"),
    Case("adapter", "lora/adapter_model.safetensors", _read_adapter),
    Case("adapter-config", "lora/adapter_config.json", _read_adapter),
    Case("record", "applied/unmerge.json", _read_record),
    Case("norms", "run/norms.safetensors", _read_norms, "norms"),
    Case("answers", "answers.safetensors", _read_answers, "language answers"),
]
# Each reading draws a page of charts, so that there are fewer examples.
PAGES = [Case(f"run-{name}", f"run/{name}.json", _read_run) for name in ("run", "diagnosis", "alpha", "curve")]
