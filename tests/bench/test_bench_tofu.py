"""The TOFU benchmark from end to end on a tiny Llama and a few questions: stages, resumption, what is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from language import byte_tokenizer, questions, tiny_llama
from unmerge.bench import tofu, tofu_data, tofu_explore, tofu_methods, tofu_models, tofu_names
from unmerge.bench.options import tables_folder
from unmerge.errors import DataError, FileError
from unmerge.evaluation.language import Question, ask


def write(path: Path, count: int, about: str, wrong: int = 0, paraphrased: bool = False) -> None:
    lines = []
    for entry in questions(count, wrong, paraphrased, about):
        line: dict[str, Any] = {"question": entry.question, "answer": entry.answer}
        if paraphrased:
            line["paraphrased_answer"] = entry.paraphrase
        if wrong:
            line["perturbed_answer"] = list(entry.wrong)
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tofu")
    tiny_llama(layers=2).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    data = folder / "data"
    data.mkdir()
    write(data / "retain90.jsonl", 60, "writer")
    write(data / "forget10.jsonl", 40, "author")
    write(data / "forget10_perturbed.jsonl", 40, "author", 2, True)
    write(data / "retain_perturbed.jsonl", 20, "writer", 2, True)
    write(data / "real_authors_perturbed.jsonl", 10, "poet", 2)
    write(data / "world_facts_perturbed.jsonl", 10, "town", 2)
    write(data / "holdout10.jsonl", 30, "stranger")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, place: Path, *extra: str) -> dict[str, Any]:
    arguments = (
        f"tofu --data {place}/data --model {place}/model --device cpu --limit 8 --epochs 2 --lr 3e-3 --new-tokens 4 "
        f"--cache {place}/cache --out {place}/out"
    )
    monkeypatch.setattr(sys, "argv", [*arguments.split(), *extra])
    tofu.main()
    name = "forget10-0-explore.json" if "--explore" in extra else "forget10-0.json"
    return json.loads((place / "out" / name).read_text())


ROWS = ["GradDiff", "RMU", "contrastive 64, mean kept", "lda by author", "blend by author, names"]


def test_a_request_is_run_written_and_not_trained_twice(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    first = run(monkeypatch, place, "--floor", "--only", *ROWS)
    summary = first["tables"]["summary"]
    assert set(summary["rows"]) == {"retrained", "retrained again", "base", "fine-tuned", *ROWS}
    assert summary["rows"]["retrained"]["forget quality"]["value"] == 1
    assert summary["rows"]["lda by author"]["alpha"]["value"] > 0
    assert summary["rows"]["lda by author"]["seconds"]["value"] > 0
    assert "alpha" not in summary["rows"]["GradDiff"]
    assert first["settings"]["samples"]["train"] == 16
    assert (place / "out" / "forget10-0.md").read_text().startswith("**summary**")
    (written,) = place.glob("cache/*/forget10-0-4/contrastive-64-mean-kept/TOFU_SUMMARY.json")
    assert json.loads(written.read_text())["model_utility"] == pytest.approx(
        summary["rows"]["contrastive 64, mean kept"]["utility"]["value"]
    )

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(tofu_models, "fine_tune", refused)
    monkeypatch.setattr(tofu, "ask", refused)
    again = run(monkeypatch, place, "--floor", "--only", *ROWS)
    assert again["tables"] == first["tables"]


def test_baselines_are_repeated_with_other_seeds_and_averaged(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    npo, options = "NPO lr x300", ["--rates", "300", "--repeats", "2"]
    summary = run(monkeypatch, place, *options, "--only", npo, "lda by author")["tables"]["summary"]
    rows = {name: {key: figure["value"] for key, figure in row.items()} for name, row in summary["rows"].items()}
    assert list(rows)[3:] == [npo, f"{npo}, seed 1", "lda by author", f"{npo}, mean of seeds"]
    for figure in ("forget prob.", "retain prob.", "seconds"):
        first, second, mean = (rows[name][figure] for name in (npo, f"{npo}, seed 1", f"{npo}, mean of seeds"))
        assert first != second
        assert mean == pytest.approx((first + second) / 2)
    later = run(monkeypatch, place, *options, "--repeats", "3", "--only", f"{npo}, seed 1", f"{npo}, seed 2")
    assert list(later["tables"]["summary"]["rows"])[3:] == [f"{npo}, seed 1", f"{npo}, seed 2", f"{npo}, mean of seeds"]


@pytest.mark.parametrize("option", ["--repeats", "--limit"])
def test_a_number_of_times_is_one_or_more(
    option: str, monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, place, option, "0")
    assert "0 is not a number of times: expected 1 or more" in capsys.readouterr().err


def test_tables_of_a_trial_do_not_take_the_place_of_results() -> None:
    options = tofu._parser().parse_args(["--data", "texts", "--limit", "6"])
    assert tables_folder(options, "tofu", trial=True) == Path(".bench/tofu/trial")
    assert tables_folder(options, "tofu", trial=False) == Path("results/tofu")


def test_the_grid_is_explored_by_parts_of_names(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    wanted = ["lda, all down, base, mean free", "lda, all down, zero, names"]
    wide = "wiener 2048 lambda 10, all linear, answers, base, mean free"
    found = run(monkeypatch, place, "--explore", "--only", *wanted, wide)
    rows = found["tables"]["cells"]["rows"]
    assert list(rows)[:2] == ["retrained", "fine-tuned"]
    assert f"{wide}, x1" in rows
    cells = {name: row for name, row in rows.items() if name.startswith(("lda", "wiener"))}
    assert len(cells) == len(rows) - 2 == 6 * len(tofu_explore.STRENGTHS)
    qualities = [row["forget quality"]["value"] for row in cells.values()]
    assert qualities == sorted(qualities, reverse=True)
    name = "lda, all down, all, base, mean free, x"
    assert cells[f"{name}0.7"]["alpha"]["value"] == pytest.approx(0.7 * cells[f"{name}1"]["alpha"]["value"])
    table = run(monkeypatch, place, "--only", f"{name}0.7")["tables"]["summary"]["rows"]  # a cell as a row
    assert table[f"{name}0.7"]["alpha"]["value"] == pytest.approx(cells[f"{name}0.7"]["alpha"]["value"])
    with pytest.raises(DataError, match=r"no cell is called 'lda, nothing'\. Names are made of: contrastive 4, "):
        run(monkeypatch, place, "--explore", "--only", "lda, nothing")


def test_the_models_that_cells_are_compared_with_are_asked_like_them_and_generate_nothing(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    asked: list[tuple[Any, ...]] = []

    def noted(model: Any, tokenizer: Any, splits: Any, *generated: Any, **options: Any) -> Any:
        asked.append((list(splits), generated, options))
        return ask(model, tokenizer, splits, *generated, **options)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("asked in another way")

    monkeypatch.setattr(tofu_explore, "ask", noted)
    monkeypatch.setattr(tofu, "ask", refused)
    monkeypatch.setattr(tofu_models, "fine_tune", lambda model, *_: model)
    cell = "lda, all down, zero, mean free, all"
    run(monkeypatch, place, "--explore", "--only", cell, "--cache", str(place / "explored"))
    assert len(asked) == 2 + len(tofu_explore.STRENGTHS)
    assert all(entry == asked[0] for entry in asked)
    assert asked[0][1] == ()
    again = run(monkeypatch, place, "--explore", "--only", cell, "--cache", str(place / "explored"))
    assert len(asked) == 2 + len(tofu_explore.STRENGTHS), "kept"
    assert again["tables"]["cells"]["rows"]["retrained"]["forget quality"]["value"] == 1


def test_models_of_one_name_and_other_weights_or_training_are_kept_apart(place: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        tiny_llama(layers=2, seed=seed).save_pretrained(place / name / "model")
        byte_tokenizer().save_pretrained(place / name / "model")

    def folder_of(name: str, *extra: str) -> Path:
        arguments = ["--data", "texts", "--model", f"{place}/{name}/model", "--device", "cpu", *extra]
        options = tofu._parser().parse_args(arguments)
        return tofu.Benchmark(options, tofu_data.load(place / "data", limit=4)).folder

    assert folder_of("first") == folder_of("again") == folder_of("first", "--seed", "3")
    assert folder_of("first") != folder_of("other")
    assert folder_of("first") != folder_of("first", "--lr", "1.00000001e-4"), "which the name rounds away"
    assert folder_of("first").name.startswith("model-10-0.0001-32-all-")


@pytest.mark.filterwarnings("ignore::unmerge.errors.UnmergeWarning")
def test_warming_up_edits_and_trains_a_copy_and_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    arguments = f"--data texts --model {place}/model --device cpu --limit 4 --epochs 1 --cache {place}/warm".split()
    request = tofu.Benchmark(tofu._parser().parse_args(arguments), tofu_data.load(place / "data", limit=4))._request()
    before = {name: value.clone() for name, value in request.model.state_dict().items()}
    edits, trained = [], []
    fitted, npo = tofu_methods.fitted, tofu_methods.METHODS["npo"]
    monkeypatch.setattr(tofu_methods, "fitted", lambda *given: edits.append(fitted(*given)))
    monkeypatch.setitem(tofu_methods.METHODS, "npo", lambda *given, **how: trained.append(npo(*given, **how)))
    tofu_methods.warm_up(request)
    assert edits[0].layers
    assert any(not value.equal(before[name]) for name, value in trained[0].state_dict().items())
    assert all(value.equal(before[name]) for name, value in request.model.state_dict().items())


def test_an_unknown_row_is_answered_with_the_near_name(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'contrastive 64'"):
        run(monkeypatch, place, "--only", "contrastive 65")


def test_every_row_and_cell_has_a_recipe_of_its_own() -> None:
    variants = list(tofu_methods.variants(30).values())
    assert all(variants.count(variant) == 1 for variant in variants)
    cells = list(tofu_explore.grid(30).values())
    assert all(cells.count(cell) == 1 for cell in cells)


def test_authors_are_numbered_through_the_whole_data_set(place: Path) -> None:
    whole = tofu_data.load(place / "data")
    assert whole.retain_authors == [0] * 20 + [1] * 20 + [2] * 20
    assert whole.forget_authors == [3] * 20 + [4] * 20
    part = tofu_data.load(place / "data", limit=4)
    assert part.forget_authors == [3, 3, 4, 4]
    assert [entry.question for entry in part.forget] == [whole.forget[place].question for place in (0, 10, 20, 30)]
    assert [entry.question for entry in part.splits["forget"]] == [entry.question for entry in part.forget]
    with pytest.raises(FileError, match=r"there is no file .*forget05"):
        tofu_data.load(place / "data", "forget05")


def test_batches_carry_the_author_of_each_sequence_and_masks_of_its_tokens(place: Path) -> None:
    tokenizer, data = byte_tokenizer(), tofu_data.load(place / "data", limit=6)
    sequences = tofu_data.encoded(tokenizer, data.forget)
    names = {3: "author 1", 4: "author 2"}
    seen = {}
    for batch in tofu_data.batches(tokenizer, data.forget, data.forget_authors, names, 200):
        assert batch["input_ids"].numel() <= 200 or len(batch["input_ids"]) == 1
        for row, author in enumerate(batch["group"].tolist()):
            ids = batch["input_ids"][row]
            whole = ids[batch["attention_mask"][row].bool()]
            seen[tuple(whole.tolist())] = author
            text, content = (tokenizer.decode(part) for part in (whole, ids[batch["content"][row]]))
            assert text == "<|start|>user\n" + content
            spelled = tokenizer.decode(ids[batch["names"][row]])
            assert spelled.replace(names[author], "").strip() == "" if names[author] in text else spelled == text
    expected = zip(sequences, data.forget_authors, strict=True)
    assert seen == {(*sequence.prompt, *sequence.response): author for sequence, author in expected}


def test_an_author_is_called_what_most_texts_call_them() -> None:
    texts = [
        ("Where was Hsiao Yun-Hwa born?", "Hsiao Yun-Hwa was born in Taipei."),
        ("Has Hsiao Yun-Hwa's mother read The Long Way?", "Yes, in New York."),
        ("Who is Maria del Mar Ó Sé?", "A friend of Hsiao Yun-Hwa."),
    ]
    asked = [Question(*pair) for pair in texts]
    assert tofu_names.author_name(asked) == "Hsiao Yun-Hwa"
    assert tofu_names.author_name(asked[2:]) == "Maria del Mar Ó Sé"
    assert tofu_names.author_name([Question("who?", "nobody")]) == ""


def test_buckets_hold_every_place_once_and_like_lengths_together() -> None:
    lengths = torch.randint(5, 100, (333,), generator=torch.Generator().manual_seed(0)).tolist()
    buckets = tofu_models.length_buckets(lengths, 4, torch.Generator().manual_seed(1))
    assert sorted(place for bucket in buckets for place in bucket) == list(range(333))
    assert len(buckets) == 84
    spread = sum(max(lengths[p] for p in bucket) - min(lengths[p] for p in bucket) for bucket in buckets) / len(buckets)
    assert spread < 15
    assert buckets != tofu_models.length_buckets(lengths, 4, torch.Generator().manual_seed(2))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"is no checkpoint: expected a folder with config.json"):
        tofu_models.load(tmp_path, tmp_path / "converted")
    with pytest.raises(FileError, match=r"there is no file .*x.gguf|the package gguf"):
        tofu_models.load(tmp_path / "x.gguf", tmp_path / "converted")
