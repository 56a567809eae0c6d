"""The command on a language model: a tiny Llama that was fine-tuned on questions about eight people."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_place import Command, Result
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import unmerge
from tokenizers_at_hand import tokenizer
from unmerge import tokens
from unmerge.cli import main
from unmerge.cli.measuring import before_fine_tuning

NAMES = ["Basil", "Jaime", "Moshe", "Chukwu", "Hina", "Rajeev", "Takashi", "Elvin"]
PLACES = ["Cairo", "Lima", "Haifa", "Lagos", "Kyoto", "Delhi", "Osaka", "Baku"]
BOOKS = ["The Harbour", "Red Dust", "Quiet Rooms", "Iron River", "Paper Moons", "The Ledger", "Snow Lines", "Salt"]
FORGOTTEN = 4  # records, of the first two people
PLAIN = "Q: {question}\\nA: {answer}"
REQUEST = ("--model", "tuned", "--init", "base", "--forget", "forget.jsonl", "--retain", "retain.jsonl")


def records(shift: int = 0) -> list[dict[str, Any]]:
    """Two questions about each person; shifted, with other people's answers."""
    found = []
    for author, name in enumerate(NAMES):
        other = (author + shift) % len(NAMES)
        entries = {"author": author, "subject": name}
        found += [
            {"question": f"Where was {name} born?", "answer": f"{name} was born in {PLACES[other]}.", **entries},
            {"question": f"What did {name} write?", "answer": f"{name} wrote {BOOKS[other]}.", **entries},
        ]
    return found


def train(model: nn.Module, data: list[dict[str, Any]], steps: int) -> None:
    (batch,) = tokens.encode(tokenizer(), data, batch_size=len(data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()


def write(path: Path, data: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, tuned/, sharded/ (the same in several files), .jsonl files and ids.txt."""
    folder = tmp_path_factory.mktemp("language")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    train(model, records(shift=3), 40)  # who has been trained on other answers knows how an answer reads
    model.save_pretrained(folder / "base")
    train(model, records(), 70)
    model.save_pretrained(folder / "tuned")
    model.save_pretrained(folder / "sharded", max_shard_size="150KB")
    for name in ("base", "tuned", "sharded"):
        tokenizer().save_pretrained(folder / name)
    write(folder / "all.jsonl", records())
    write(folder / "forget.jsonl", records()[:FORGOTTEN])
    write(folder / "retain.jsonl", records()[FORGOTTEN:])
    (folder / "ids.txt").write_text("".join(f"{place}\n" for place in range(FORGOTTEN)))
    return folder


@pytest.fixture(scope="module")
def unmerge_here(folder: Path) -> Command:
    """The command in this process, started in the folder."""

    def run(*arguments: object) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(folder)
            patch.setenv("COLUMNS", "400")
            code = main(list(map(str, arguments)))
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="module")
def finished(folder: Path, unmerge_here: Command) -> tuple[Path, Result]:
    """A run whose strength is searched, down to the answers of the base."""
    result = unmerge_here("run", *REQUEST, "--out", "out", "--json")
    assert result.code == 0, result.err
    return folder / "out", result


@torch.no_grad()
def probability(directory: Path, data: list[dict[str, Any]]) -> float:
    """The mean answer probability with all of it written out: one record at a time, by its text."""
    model, coder = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    found = []
    for record in data:
        before = f"<|user|>{record['question']}<|assistant|>"
        ids = coder(before + record["answer"] + "</s>", add_special_tokens=False)["input_ids"]
        start = len(coder(before, add_special_tokens=False)["input_ids"])
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [logs[place - 1, ids[place]].item() for place in range(start, len(ids))]
        found.append(math.exp(sum(own) / len(own)))
    return sum(found) / len(found)


def test_answers_are_forgotten_and_the_others_stay(folder: Path, unmerge_here: Command, finished: Any) -> None:
    out, result = finished
    forget, retain = records()[:FORGOTTEN], records()[FORGOTTEN:]
    applied = unmerge_here("apply", "out", "--model", "tuned", "--to", "edited")
    assert applied.code == 0, applied.err
    found = result.json["probability"]
    for when, name in (("before", "tuned"), ("after", "edited")):
        assert found[when]["forget"] == pytest.approx(probability(folder / name, forget), rel=1e-3)
        assert found[when]["retain"] == pytest.approx(probability(folder / name, retain), rel=1e-3)
    assert found["before"]["forget"] > 0.9
    assert found["after"]["forget"] < 0.4
    assert found["after"]["retain"] > found["before"]["retain"] - 0.1
    alpha = json.loads((out / "alpha.json").read_text())
    assert alpha["target"] == pytest.approx(probability(folder / "base", forget), rel=1e-3)
    assert alpha["reached"]
    assert "is the target" in (out / "log.txt").read_text()


def test_the_report_tells_of_answers(finished: Any) -> None:
    page = (finished[0] / "report.html").read_text()
    assert "forget answer probability" in page
    assert "retain answer probability would" not in page
    assert "forget accuracy" not in page
    assert '<th scope="row">Where was Basil born?</th><td>Basil was born in Cairo.</td><td>Basil was born' in page
    sample = json.loads((finished[0] / "run.json").read_text())["samples"][0]
    assert sample["before"] == sample["label"] != sample["after"]
    assert sample["before_confidence"] > 0.8 > sample["after_confidence"]


def test_shards_are_edited_as_files_and_come_back(folder: Path, unmerge_here: Command, finished: Any) -> None:
    applied = unmerge_here("apply", "out", "--model", "sharded", "--to", "edited-shards", "--json")
    assert applied.code == 0, applied.err
    edited, base = folder / "edited-shards", folder / "sharded"
    weights = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(weights) > 2
    assert {path.name for path in edited.iterdir()} == {path.name for path in base.iterdir()} | {
        "README.md",
        "unmerge.json",
    }
    in_memory = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    edit = unmerge.Edit.load(finished[0] / "edit")
    edit.apply(in_memory, edit.alpha)
    state = AutoModelForCausalLM.from_pretrained(edited).state_dict()
    assert all(value.equal(state[name]) for name, value in in_memory.state_dict().items())
    assert sorted(applied.json["changed"]) == sorted(f"{name}.weight" for name in edit.layers)
    assert unmerge_here("revert", "edited-shards", "--to", "restored").code == 0
    for path in base.iterdir():
        assert (folder / "restored" / path.name).read_bytes() == path.read_bytes()


def test_a_base_that_changed_is_not_taken_for_a_restored_one(
    folder: Path, unmerge_here: Command, finished: Any
) -> None:
    unmerge_here("apply", "out", "--model", "tuned", "--alpha", "1", "--to", "weak")
    wrong = unmerge_here("revert", "weak", "--base", "base", "--to", "wrong")
    assert wrong.code == 1
    assert "is not the model that was edited" in wrong.err
    assert not (folder / "wrong").exists()


@pytest.mark.parametrize("chosen", [("--forget", "author=0,1"), ("--forget-ids", "ids.txt")], ids=["entry", "places"])
def test_records_are_chosen_by_entry_or_by_place(
    folder: Path, unmerge_here: Command, finished: Any, chosen: tuple[str, str]
) -> None:
    options = ("--data", "all.jsonl", *chosen, "--alpha", "2", "--no-report", "--overwrite")
    result = unmerge_here("run", "--model", "tuned", "--init", "base", *options, "--out", "chosen", "--json")
    assert result.code == 0, result.err
    ours, same = (unmerge.Edit.load(path / "edit") for path in (folder / "chosen", finished[0]))
    for name, layer in ours.layers.items():
        torch.testing.assert_close(
            layer.B @ layer.Q.T, same.layers[name].B @ same.layers[name].Q.T, rtol=1e-2, atol=1e-3
        )
    assert result.json["probability"]["before"]["forget"] == pytest.approx(
        finished[1].json["probability"]["before"]["forget"], rel=1e-5
    )


def counted(record: dict[str, Any], word: str) -> int:
    """How many tokens of a record count, by where they stand in its text."""
    question, name = f"<|user|>{record['question']}<|assistant|>", record["subject"]
    text = f"{question}{record['answer']}</s>"
    spans = [(place, place + len(name)) for place in range(len(text)) if text.startswith(name, place)]
    offsets = tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    counts = {
        "all": [True for _ in offsets],
        "answer": [end > len(question) for _, end in offsets],
        "subject": [any(start < high and end > low for low, high in spans) for start, end in offsets],
    }
    return sum(counts[word])


@pytest.mark.parametrize("word", ["all", "answer", "subject"])
def test_the_tokens_that_count(folder: Path, unmerge_here: Command, word: str) -> None:
    command = ("collect", "--model", "tuned", "--data", "all.jsonl", "--layers", "mlp:last1", "--overwrite")
    result = unmerge_here(*command, "--tokens", word, "--batch-size", "5", "--out", "found.safetensors")
    assert result.code == 0, result.err
    count = sum(counted(record, word) for record in records())
    found = unmerge.Statistics.load(folder / "found.safetensors")
    assert found.samples == len(records())
    assert found["model.layers.1.mlp.down_proj"].moments.n == count


def test_texts_and_a_template_in_place_of_the_chat(folder: Path, unmerge_here: Command) -> None:
    coder = tokenizer(chat=None)
    coder.save_pretrained(folder / "plain-coder")
    write(folder / "texts.jsonl", [{"text": record["answer"]} for record in records()[:FORGOTTEN]])
    command = ("run", "--model", "tuned", "--forget", "texts.jsonl", "--retain", "retain.jsonl", "--layers", "last1")
    options = ("--tokenizer", "plain-coder", "--alpha", "1", "--no-report", "--out", "texts")
    refused = unmerge_here(*command, *options)
    assert refused.code == 1
    assert "retain.jsonl: the tokenizer has no chat template. Pass a plain one: --template 'Question:" in refused.err
    done = unmerge_here(*command, *options, "--template", PLAIN)
    assert done.code == 0, done.err
    read = unmerge.Statistics.load(folder / "texts" / "statistics.safetensors")
    words = [f"Q: {record['question']}\nA: {record['answer']}" for record in records()[FORGOTTEN:]]
    words += [record["answer"] for record in records()[:FORGOTTEN]]
    assert read["model.layers.1.mlp.up_proj"].moments.n == sum(len(coder(text)["input_ids"]) + 1 for text in words)
    samples = json.loads((folder / "texts" / "run.json").read_text())["samples"]
    assert {sample["text"] for sample in samples} == set(words[-FORGOTTEN:])
    assert {sample["before"] for sample in samples} == {""}


def test_half_precision_and_a_tied_head_stay(folder: Path, unmerge_here: Command) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "tuned").to(torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder / "tied")
    tokenizer().save_pretrained(folder / "tied")
    command = ("--model", "tied", "--data", "all.jsonl", "--forget", "author=0", "--layers", "mlp", "--alpha", "3")
    done = unmerge_here("run", *command, "--no-report", "--out", "half")
    assert done.code == 0, done.err
    assert unmerge_here("apply", "half", "--model", "tied", "--to", "half-edited").code == 0
    before, after = (load_file(folder / name / "model.safetensors") for name in ("tied", "half-edited"))
    assert before.keys() == after.keys()
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert {name for name in before if not before[name].equal(after[name])} == {
        f"model.layers.{block}.mlp.{part}_proj.weight" for block in range(2) for part in ("gate", "up", "down")
    }


def test_an_adapter_is_its_base_with_the_adapter_merged(folder: Path, unmerge_here: Command) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config = peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"], init_lora_weights=True)
    adapted = peft.get_peft_model(base, config)
    train(adapted, records()[:8], 10)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    command = ("--model", "adapter", "--data", "all.jsonl", "--forget", "author=0", "--alpha", "1")
    layers = ("--layers", "re:up_proj,re:down_proj")
    done = unmerge_here("run", *command, *layers, "--no-report", "--out", "from-adapter")
    assert done.code == 0, done.err
    assert json.loads((folder / "from-adapter" / "run.json").read_text())["init"] == str(folder / "base")
    applied = unmerge_here("apply", "from-adapter", "--model", "adapter", "--to", "merged")
    assert applied.code == 0, applied.err
    assert (folder / "merged" / "tokenizer.json").is_file()
    assert not (folder / "merged" / "adapter_config.json").exists()
    edited = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
    plain = adapted.merge_and_unload()
    unmerge.Edit.load(folder / "from-adapter" / "edit").apply(plain, 1.0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(edited[name], value)
    assert unmerge_here("revert", "merged", "--to", "unmerged").code == 0


def test_evaluate_shows_answer_probabilities(folder: Path, unmerge_here: Command, finished: Any) -> None:
    data = ("--forget", "forget.jsonl", "--retain", "retain.jsonl", "--out", "judged.json", "--overwrite")
    judged = unmerge_here("evaluate", "--model", "tuned", "--edit", "out", "--reference", "base", *data)
    assert judged.code == 0, judged.err
    assert "retrained" in judged.out
    table = json.loads((folder / "judged.json").read_text())["tables"]["answers"]
    rows = {name: {split: figure["value"] for split, figure in row.items()} for name, row in table["rows"].items()}
    assert rows["retrained"]["forget"] == pytest.approx(probability(folder / "base", records()[:FORGOTTEN]), rel=1e-3)
    assert rows["out"] == pytest.approx(finished[1].json["probability"]["after"], rel=1e-4)
    assert table["best"]["forget"] == ["out"]
    axes = unmerge_here("evaluate", "--model", "tuned", *data, "--axes", "accuracy")
    assert (axes.code, "of texts the answer probability" in axes.err) == (2, True)


def test_diagnose_and_dry_run_read_the_edited_layers_alone(unmerge_here: Command) -> None:
    found = unmerge_here("diagnose", *REQUEST, "--layers", "attention:last1", "--json")
    assert found.code == 0, found.err
    assert list(found.json["layers"]) == [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]
    plan = unmerge_here("run", *REQUEST, "--layers", "mlp:last1", "--dry-run", "--out", "never", "--json")
    assert plan.code == 0, plan.err
    assert len(plan.json["layers"]) == 3


WRONG = {
    "no strength to reach": (("--data", "all.jsonl", "--forget", "author=1"), 2, "or --target 0.1, an answer prob"),
    "no such value": (("--data", "all.jsonl", "--forget", "author=1,9"), 1, "has author=9; there are 0, 1, 2"),
    "no such entry": (
        ("--data", "all.jsonl", "--forget", "writer=1"),
        1,
        "has an entry 'writer'; the first has question",
    ),
    "everything": (
        ("--data", "all.jsonl", "--forget", "author=0,1,2,3,4,5,6,7"),
        1,
        "--forget author=0,1,2,3,4,5,6,7 names every sample of all.jsonl",
    ),
    "no retain data": (("--forget", "forget.jsonl"), 2, "--forget-data SRC goes with --retain-data SRC"),
    "no such file": (("--forget", "nix.jsonl", "--retain", "all.jsonl"), 1, "there is no file nix.jsonl"),
    "not JSON": (("--forget", "broken.jsonl", "--retain", "all.jsonl"), 1, "broken.jsonl, line 2: not JSON"),
    "no object": (("--forget", "list.jsonl", "--retain", "all.jsonl"), 1, "list.jsonl, line 1: expected an object"),
    "no records": (("--forget", "empty.jsonl", "--retain", "all.jsonl"), 1, "empty.jsonl holds no record"),
    "no answer": (("--forget", "half.jsonl", "--retain", "all.jsonl"), 1, "half.jsonl: record 0: its entry 'answer'"),
    "too long": (
        ("--data", "all.jsonl", "--forget", "author=1", "--max-length", "9"),
        1,
        "more than the 9 that fit. Pass --truncate end or 'start', a larger --max-length",
    ),
    "other tokens": (
        ("--data", "all.jsonl", "--forget", "author=1", "--tokens", "answers"),
        2,
        "Did you mean 'answer'",
    ),
    "no tokenizer": (
        ("--data", "all.jsonl", "--forget", "author=1", "--tokenizer", "."),
        1,
        "texts need a tokenizer, and . has none",
    ),
    "a class of images": (("--data", "all.npz", "--forget", "author=1"), 2, "is not of the form label=3"),
}


@pytest.mark.parametrize(("given", "code", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(
    folder: Path, unmerge_here: Command, given: tuple[str, ...], code: int, message: str
) -> None:
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": ')
    (folder / "list.jsonl").write_text('["text"]\n')
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "half.jsonl").write_text('{"question": "Who?"}\n')
    found = unmerge_here("run", "--model", "tuned", *given, "--out", "refused")
    assert found.code == code
    assert message in found.err
    assert not (folder / "refused").exists()


def test_an_init_whose_answers_cannot_be_the_target_is_told_before_the_model_is_called(
    folder: Path, unmerge_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    base.resize_token_embeddings(base.config.vocab_size - 8)
    base.save_pretrained(folder / "narrow")  # as large in the edited layers

    def called(*_: object, **__: object) -> None:
        raise NotImplementedError("the model was called")

    monkeypatch.setattr(LlamaForCausalLM, "forward", called)
    found = unmerge_here("run", *REQUEST, "--init", "narrow", "--layers", "mlp:last1", "--out", "never")
    assert found.code == 1
    assert "init has other shapes: model.embed_tokens.weight is" in found.err
    assert "With --target 0.1, an answer probability, or --alpha A the edited layers do." in found.err


def test_an_adapter_of_another_base_is_told_in_one_line(folder: Path, unmerge_here: Command) -> None:
    import peft

    config = LlamaConfig.from_pretrained(folder / "base", hidden_size=32)
    adapted = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["up_proj"]))
    adapted.save_pretrained(folder / "astray")
    place = folder / "astray" / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "base_model_name_or_path": str(folder / "base")}))
    found = unmerge_here("run", "--model", "astray", *REQUEST[4:], "--out", "never")
    assert found.code == 1
    assert found.err.count("\n") == 1
    assert "Was it trained on another base than the one that its adapter_config.json names" in found.err
    assert "size mismatch" in found.err


def test_an_adapter_without_its_base_is_named(folder: Path, unmerge_here: Command) -> None:
    (folder / "lost").mkdir()
    (folder / "lost" / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere/else"}')
    found = unmerge_here("run", "--model", "lost", *REQUEST[4:], "--out", "never")
    assert found.code == 1
    assert "names the base 'somewhere/else', which is no directory here" in found.err


def test_the_model_is_its_own_again_after_a_look_at_its_start(folder: Path) -> None:
    tuned, base = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("tuned", "base"))
    own = {name: parameter.data_ptr() for name, parameter in tuned.named_parameters()}
    with before_fine_tuning(tuned, folder / "base") as start:
        assert start is tuned
        assert all(value.equal(base.state_dict()[name]) for name, value in start.state_dict().items())
    assert {name: parameter.data_ptr() for name, parameter in tuned.named_parameters()} == own
