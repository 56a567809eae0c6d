"""evaluate(): everything together on a small network, and what it says when something is wrong or missing."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from networks import batched, cnn, mlp, request, samples, split
from terminal import Terminal
from unmerge.errors import DataError, LayerError, UnmergeWarning
from unmerge.evaluation import Outputs, evaluate, outputs
from unmerge.evaluation.pipeline import AXES

SHAPE = (3, 6, 6)


@pytest.fixture(scope="module")
def splits() -> dict[str, list]:
    forget, retain = request(SHAPE, (0,), (1, 2, 3), each=30)
    test = samples(SHAPE, [0, 1, 2, 3] * 10, seed=5)
    return {"forget": batched(forget, 16), "retain": batched(retain, 16), "test": batched(test, 16)}


@pytest.fixture(scope="module")
def models(splits: dict[str, list]) -> dict[str, nn.Module]:
    def trained(seed: int, *names: str) -> nn.Module:
        model = cnn(seed=seed).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        images, labels = (torch.cat([batch[part] for name in names for batch in splits[name]]) for part in (0, 1))
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return model.eval()

    tuned = trained(0, "forget", "retain")
    masked = copy.deepcopy(tuned)
    with torch.no_grad():
        masked.fc.weight[0] = 0
        masked.fc.bias[0] = -1e4
    return {"tuned": tuned, "masked": masked, "retrained": trained(0, "retain"), "again": trained(1, "retain")}


def test_a_terminal_shows_how_many_models_are_left(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, nn.Module], splits: dict[str, list]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    evaluate({"tuned": models["tuned"], "masked": models["masked"]}, models["retrained"], splits, ["accuracy"])
    assert "evaluating:   0%" in terminal.getvalue()
    assert "0/3" in terminal.getvalue()


def test_full_table(models: dict[str, nn.Module], splits: dict[str, list], tmp_path: Path) -> None:
    state = torch.get_rng_state()
    before = {name: copy.deepcopy(model.state_dict()) for name, model in models.items()}
    result = evaluate(
        {"tuned": models["tuned"], "masked": models["masked"]},
        models["retrained"],
        splits,
        floor=models["again"],
        init="zero",
        groups={"0 in test": ("test", [0]), "others in test": ("test", [1, 2, 3])},
        seed=4,
    )
    assert result.missing == {}
    for table in result.tables.values():
        assert list(table.cells) == ["retrained", "retrained again", "tuned", "masked"]
        assert table.anchors == ["retrained", "retrained again"]
        for row in table.cells.values():
            assert list(row) == [column.label for column in table.columns]
            assert all(figure.value == figure.value for figure in row.values())
    accuracy = result["accuracy"]
    assert accuracy["retrained"]["ToW"].value == 1
    assert accuracy["tuned"]["forget"].value > 0.9
    assert accuracy["masked"]["forget"].value == 0
    assert accuracy["masked"]["ToW"].value > accuracy["tuned"]["ToW"].value
    # A mask changes no feature, which is what the feature axes are for.
    for title in ("entanglement", "decodability"):
        assert result[title]["masked"] == result[title]["tuned"]
    assert result["fidelity"]["retrained"]["KL forget"].value == 0
    assert result["fidelity"]["masked"]["KL forget"].value < result["fidelity"]["tuned"]["KL forget"].value
    assert all(
        result["membership gaps"]["retrained"][name].value == 0 for name in result["membership gaps"]["retrained"]
    )
    assert result.settings["seed"] == 4
    assert result.settings["samples"] == {"forget": 30, "retain": 90, "test": 40}
    assert result.settings["feature_layer"] == "fc:input"
    assert len(result.examples["masked"]["log-odds"]) == 30
    for export in ("to_json", "to_csv", "to_markdown", "to_latex"):
        getattr(result, export)(tmp_path / export)
        assert (tmp_path / export).stat().st_size
    # Nothing has changed, and the same call gives the same figures.
    assert torch.equal(torch.get_rng_state(), state)
    for name, model in models.items():
        assert all(torch.equal(value, before[name][key]) for key, value in model.state_dict().items())


def test_same_seed_same_figures(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    given = {"tuned": models["tuned"]}, models["retrained"], splits
    assert evaluate(*given).to_dict() == evaluate(*given).to_dict()


def test_kept_outputs_equal_a_new_pass(models: dict[str, nn.Module], splits: dict[str, list], tmp_path: Path) -> None:
    outputs(models["retrained"], splits).save(tmp_path / "reference.safetensors")
    kept = Outputs.load(tmp_path / "reference.safetensors")
    axes = ["accuracy", "entanglement", "membership", "fidelity", "decodability", "calibration"]
    first = evaluate({"tuned": models["tuned"]}, models["retrained"], splits, axes)
    second = evaluate({"tuned": models["tuned"]}, kept, splits, axes)
    assert first.to_dict()["tables"] == second.to_dict()["tables"]
    # Without any model at all.
    third = evaluate({"tuned": outputs(models["tuned"], splits)}, kept, {}, axes)
    assert first.to_dict()["tables"] == third.to_dict()["tables"]


def test_shuffled_loaders_give_the_same_figures(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    loaders = {
        name: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*data, strict=True))), 16, shuffle=True
        )
        for name, data in splits.items()
    }
    axes = ["accuracy", "entanglement", "fidelity"]
    kept = outputs(models["retrained"], splits)
    mixed = evaluate({"tuned": models["tuned"]}, kept, loaders, axes)
    plain = evaluate({"tuned": models["tuned"]}, kept, splits, axes)
    for title, table in plain.tables.items():
        for label, figure in table["tuned"].items():
            assert mixed[title]["tuned"][label].value == pytest.approx(figure.value, rel=1e-4), (title, label)


def test_without_a_reference(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    result = evaluate({"tuned": models["tuned"]}, None, splits)
    assert {"accuracy", "distances", "membership", "decodability", "relearning", "calibration"} <= set(result.tables)
    assert "reference" in result.missing["accuracy: ToW"]
    assert "reference" in result.missing["fidelity"]
    assert "reference" in result.missing["entanglement: gaps"]
    assert "fidelity" in str(result)
    json.loads(result.to_json())


def test_without_some_splits(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    some = {"forget": splits["forget"], "valid": splits["test"]}
    result = evaluate({"tuned": models["tuned"]}, models["retrained"], some)
    assert result.missing["membership"] == "it needs the retain and the test split"
    assert result.missing["entanglement"] == "it needs the retain split"
    assert "valid" in result["accuracy"]["tuned"]
    assert "KL valid" in result["fidelity"]["tuned"]


def test_outputs_with_other_kept_features(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    kept = outputs(models["retrained"], splits, keep_features=20)
    result = evaluate({"tuned": models["tuned"]}, kept, splits, ["decodability", "entanglement"])
    assert result["decodability"]["tuned"]["gap"].low is not None
    bare = outputs(models["retrained"], splits, keep_features=0)
    result = evaluate({"tuned": models["tuned"]}, bare, splits, ["decodability"])
    assert "keep_features" in result.missing["decodability of retrained"]


def test_outputs_cannot_relearn(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    kept = outputs(models["retrained"], splits)
    result = evaluate({"tuned": models["tuned"]}, kept, splits, ["relearning"])
    assert "only outputs" in result.missing["relearning of retrained"]
    assert "retrained model could not be measured" in result.missing["relearning: mean gap of tuned"]
    assert list(result["relearning"].cells) == ["tuned"]


def test_options_reach_the_axis(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    options = {"membership": {"mode": "reference"}, "relearning": {"steps": (0, 3)}}
    result = evaluate({"tuned": models["tuned"]}, None, splits, ["membership", "relearning"], options=options)
    assert list(result["relearning"]["tuned"]) == ["after 0", "after 3"]
    assert result["membership, true negatives on forget"]["tuned"]["threshold confidence"].value == 0
    assert result.settings["options"] == {"membership": {"mode": "reference"}, "relearning": {"steps": [0, 3]}}


def test_overlapping_splits_are_warned_of(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    images, labels = splits["forget"][0]
    overlapping = splits | {"test": [*splits["test"], (images[:5], labels[:5])]}
    with pytest.warns(UnmergeWarning, match="5 of the 30 samples of split 'forget' are in split 'test' too"):
        evaluate({"tuned": models["tuned"]}, models["retrained"], overlapping, ["accuracy"])


def test_wrong_input(models: dict[str, nn.Module], splits: dict[str, list]) -> None:
    tuned = {"tuned": models["tuned"]}
    with pytest.raises(DataError, match=r"'tuned' has 4 classes, the one it is compared with 5"):
        evaluate(tuned, cnn(classes=5), splits, ["accuracy"])
    with pytest.raises(DataError, match=r"no axis 'acuracy'. Did you mean 'accuracy'"):
        evaluate(tuned, None, splits, ["acuracy"])
    with pytest.raises(DataError, match=r"'membership' has no option 'modes'. Did you mean 'mode'"):
        evaluate(tuned, None, splits, options={"membership": {"modes": 1}})
    with pytest.raises(DataError, match="at least one name and model"):
        evaluate({}, None, splits)
    with pytest.raises(DataError, match=r"is a str; expected an nn.Module or Outputs"):
        evaluate({"tuned": "model.pt"}, None, splits)  # type: ignore[dict-item]
    with pytest.raises(DataError, match="'retrained' is that of a row"):
        evaluate({"retrained": models["tuned"]}, models["retrained"], splits)
    with pytest.raises(DataError, match="pass that as reference"):
        evaluate(tuned, None, splits, floor=models["again"])
    with pytest.raises(DataError, match="splits is empty"):
        evaluate(tuned, None, {})
    with pytest.raises(DataError, match="seed >= 0"):
        evaluate(tuned, None, splits, seed=-1)
    with pytest.raises(DataError, match="one-shot iterator"):
        evaluate(tuned, models["retrained"], splits | {"test": iter(splits["test"])})
    with pytest.raises(LayerError, match="features="):
        evaluate({"flat": nn.Sequential(nn.Conv2d(3, 4, 6), nn.Flatten()).double()}, None, splits)
    with pytest.raises(DataError, match="2 labels outside the 4 classes"):
        evaluate(tuned, None, splits | {"test": [(splits["test"][0][0][:2], torch.tensor([4, 7]))]})


def test_half_a_class(splits: dict[str, list]) -> None:
    """Instance-level: the forgotten half and the retained half of a class as groups."""
    images, labels = samples((6,), [0, 1, 2] * 20, seed=1)
    half = torch.arange(60) < 30
    forget, others = split((images[half], labels[half]), (0,))
    kept, rest = split((images[~half], labels[~half]), (0,))
    retain = tuple(torch.cat(parts) for parts in zip(others, kept, rest, strict=True))
    data = {"forget": [forget], "retain": [retain], "test": [samples((6,), [0, 1, 2] * 5, seed=2)]}
    groups = {"retained half": ("retain", [0]), "other": ("retain", {1, 2})}
    result = evaluate({"m": mlp()}, mlp(seed=1), data, groups=groups)
    assert list(result["groups"]["m"]) == ["retained half", "other"]


def test_import_is_light() -> None:
    code = (
        "import sys, unmerge.evaluation; "
        "print([name for name in ('sklearn', 'scipy', 'ot', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    root = Path(__file__).parents[2] / "src"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(root)}
    )
    assert found.stdout.strip() == "[]"


def test_every_axis_has_the_same_two_functions() -> None:
    assert all(callable(axis.observe) and callable(axis.compare) for axis in AXES.values())
