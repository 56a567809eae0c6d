"""A checkpoint is edited on disk as the model is in memory, bit for bit; all else of the directory stays."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from requests_at_hand import BLOCKS, PLAIN, TEXTS, bits, image_edit, language_edit, logits, saved_decoder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, LlamaModel

from decoders import decoder
from full_disk import full_after
from networks import hf_resnet, hf_vit
from unmerge import Edit, LayerEdit, Recipe, compose, edit_checkpoint
from unmerge.errors import EditError, FileError, UnmergeWarning
from unmerge.storage.fingerprint import fingerprint


def tensors_in(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def names_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A sharded Llama in float32 with files beside its weights."""
    directory = tmp_path / "base"
    saved_decoder(directory, dtype=torch.float32)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer.model").write_bytes(b"pieces")
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# The base\n")
    return directory


@pytest.fixture
def edit(base: Path) -> Edit:
    return language_edit(AutoModelForCausalLM.from_pretrained(base).eval())


# ---- as in memory


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "gpt2-tied", "qwen2", "mixtral"])
@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensors_are_those_of_the_model_edited_in_memory(
    kind: str, shards: bool, dtype: torch.dtype, tmp_path: Path
):
    name, _, tied = kind.partition("-")
    saved_decoder(tmp_path / "base", name, shards=shards, tied=bool(tied), dtype=dtype)
    experts = {"experts_implementation": "eager"} if name == "mixtral" else {}  # so small ones have no faster way
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto", **experts).eval()
    assert model.dtype == dtype
    edit = language_edit(model, BLOCKS.but(mean="auto", layers="re:self_attn" if experts else BLOCKS.layers))
    survived = edit_checkpoint(tmp_path / "base", edit, 1.3, tmp_path / "edited")

    assert survived == edit.survived(model, 1.3)
    edit.apply(model, 1.3)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "edited", dtype="auto", **experts).eval()
    assert same_bits(bits(found), bits(model))
    assert torch.equal(logits(found, TEXTS), logits(model, TEXTS))
    # The files too: every tensor in its place, and those of no edited layer as they were.
    model.save_pretrained(tmp_path / "expected", max_shard_size="1KB" if shards else "1GB")
    assert same_bits(tensors_in(tmp_path / "edited"), tensors_in(tmp_path / "expected"))
    assert len(list((tmp_path / "edited").glob("*.safetensors"))) > 3 or not shards


def test_experts_that_the_model_holds_in_another_form_than_the_file_are_refused(tmp_path: Path):
    saved_decoder(tmp_path / "base", "mixtral", dtype=torch.float32)
    options = {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options).eval()
    layer = LayerEdit(torch.ones(24, 1), torch.eye(8)[:, :1])
    edit = Edit({"model.layers.0.mlp.experts.gate_up_proj[1]": layer}, PLAIN, 1.0)
    edit.apply(model, force=True)
    says = r"no model\.layers\.0\.mlp\.experts\.gate_up_proj.*another form"
    refused(EditError, says, tmp_path / "base", edit, tmp_path / "edited")


def test_experts_that_share_a_tensor_are_edited_each(tmp_path: Path):
    weight = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    (tmp_path / "base").mkdir()
    save_file({"moe.experts.down_proj": weight}, tmp_path / "base" / "model.safetensors")
    columns = torch.linalg.qr(torch.randn(5, 2, generator=torch.Generator().manual_seed(1)))[0]
    layers = {f"experts.down_proj[{place}]": LayerEdit(torch.full((4, 2), place + 1.0), columns) for place in (0, 2)}
    edit = Edit(layers, Recipe(), 0.5, weights=fingerprint({"experts.down_proj": weight}))
    survived = edit_checkpoint(tmp_path / "base", edit, None, tmp_path / "edited")
    expected = weight.clone()
    for place in (0, 2):
        product = layers[f"experts.down_proj[{place}]"].B @ columns.T
        expected[place] = (weight[place].float() - 0.5 * product).bfloat16()
    assert torch.equal(load_file(tmp_path / "edited" / "model.safetensors")["moe.experts.down_proj"], expected)
    assert survived.keys() == layers.keys()
    assert all(0.9 < share < 1.1 for share in survived.values())


@pytest.mark.parametrize("make", [hf_vit, hf_resnet])
def test_removed_rows_and_constants_in_biases_and_batch_norms_are_written(make: Any, tmp_path: Path):
    size = 8 if make is hf_vit else 32
    make(torch.float32).save_pretrained(tmp_path / "base", max_shard_size="2KB")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "base").eval()
    edit = image_edit(model, (3, size, size), Recipe(skip_layers=0))
    assert edit.removed == (0,)
    assert any(layer.shift_to is not None for layer in edit.layers.values())
    edit_checkpoint(tmp_path / "base", edit, None, tmp_path / "edited")
    found = AutoModelForImageClassification.from_pretrained(tmp_path / "edited")
    assert same_bits(bits(found), bits(edit.apply(model)))


def test_the_classifier_has_a_strength_of_its_own(tmp_path: Path):
    hf_vit(torch.float32).save_pretrained(tmp_path / "base")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "base").eval()
    edit = image_edit(model, (3, 8, 8))
    edit_checkpoint(tmp_path / "base", edit, 0.5, tmp_path / "edited", head_alpha=2.0)
    found = AutoModelForImageClassification.from_pretrained(tmp_path / "edited")
    assert same_bits(bits(found), bits(edit.apply(model, 0.5, head_alpha=2.0)))


def test_rows_that_an_earlier_edit_removed_stay_removed(tmp_path: Path):
    model: Any = hf_vit(torch.float32)
    first = image_edit(model, (3, 8, 8), Recipe(skip_layers=0))
    first.apply(model)
    model.save_pretrained(tmp_path / "base")
    carrier = AutoModelForImageClassification.from_pretrained(tmp_path / "base").eval()
    second = image_edit(carrier, (3, 8, 8))
    edit_checkpoint(tmp_path / "base", second, 1.0, tmp_path / "edited")
    found = AutoModelForImageClassification.from_pretrained(tmp_path / "edited")
    assert found.classifier.bias[0] == -1e4
    assert same_bits(bits(found), bits(second.apply(carrier, 1.0)))


def test_composed_edits_are_written_as_one(base: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    both = compose([language_edit(model, BLOCKS.but(layers=f"re:{name}")) for name in ("v_proj", "down_proj")], [1, 2])
    edit_checkpoint(base, both, None, tmp_path / "edited")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "edited")
    assert same_bits(bits(found), bits(both.apply(model)))


def test_the_layers_of_the_model_without_its_head_are_found(base: Path, edit: Edit, tmp_path: Path):
    inner = LlamaModel.from_pretrained(base).eval()
    found = language_edit(inner, BLOCKS)
    assert next(iter(found.layers)) == "layers.0.self_attn.q_proj"
    edit_checkpoint(base, found, 1.0, tmp_path / "edited")
    expected = AutoModelForCausalLM.from_pretrained(base)
    found.apply(expected.model, 1.0)
    assert same_bits(tensors_in(tmp_path / "edited"), bits(expected))

    # And the other way: the file was written without the head.
    inner.save_pretrained(tmp_path / "inner")
    edit_checkpoint(tmp_path / "inner", edit, 1.0, tmp_path / "inner-edited")
    assert same_bits(tensors_in(tmp_path / "inner-edited"), bits(edit_of_inner(edit, inner)))


def edit_of_inner(edit: Edit, inner: nn.Module) -> nn.Module:
    layers = {name.removeprefix("model."): layer for name, layer in edit.layers.items()}
    return Edit(layers, edit.recipe, None).apply(inner, 1.0, force=True)


def test_an_edit_fitted_in_another_type_is_rounded_once_to_the_type_of_the_file(tmp_path: Path):
    saved_decoder(tmp_path / "base", dtype=torch.bfloat16)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    edit = language_edit(wide)
    survived = edit_checkpoint(tmp_path / "base", edit, 1.0, tmp_path / "edited")
    expected = {name: tensor.bfloat16() for name, tensor in bits(edit.apply(wide, 1.0)).items()}
    assert same_bits(tensors_in(tmp_path / "edited"), expected)
    assert all(0.9 < share < 1.1 for share in survived.values())


def test_little_of_a_small_edit_survives_bfloat16_and_the_report_says_so(tmp_path: Path):
    saved_decoder(tmp_path / "base", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto").eval()
    edit = language_edit(model)
    shares = edit_checkpoint(tmp_path / "base", edit, 1e-4, tmp_path / "edited")
    assert min(shares.values()) < 0.2


# ---- the rest of the directory


def test_all_other_files_stay_and_a_card_is_written(base: Path, edit: Edit, tmp_path: Path):
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    edit_checkpoint(base, edit, 1.0, tmp_path / "deep" / "edited", base_model="somebody/some-model")
    target = tmp_path / "deep" / "edited"
    assert names_in(target) == sorted([*before, "README.base.md"])
    changed = ("README.md", *(name for name in before if name.endswith(".safetensors")))
    for name in (name for name in before if name not in changed):
        assert (target / name).read_bytes() == before[name]
    assert (target / "README.base.md").read_bytes() == before["README.md"]
    card = (target / "README.md").read_text()
    assert "base_model: somebody/some-model" in card
    assert "α = 1" in card
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["edited"]
    untouched = [name for name in before if name.endswith(".safetensors") and b"_proj" not in before[name]]
    assert untouched
    assert all((target / name).read_bytes() == before[name] for name in untouched)
    # A copy, not a link: writing over one must not change the other.
    assert all(not (target / name).samefile(base / name) for name in untouched)


def test_every_file_keeps_its_header(base: Path, edit: Edit, tmp_path: Path):
    for path in base.glob("*.safetensors"):
        save_file(load_file(path), path, metadata={"format": "pt", "note": path.name})
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    for path in base.glob("*.safetensors"):
        copied = tmp_path / "edited" / path.name
        assert copied.stat().st_size == path.stat().st_size
        with safe_open(copied, "pt") as file:
            assert file.metadata() == {"format": "pt", "note": path.name}


def test_no_name_of_the_place_is_written_into_the_card(base: Path, edit: Edit, tmp_path: Path):
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    card = (tmp_path / "edited" / "README.md").read_text()
    assert "This is `./base`" in card
    assert str(tmp_path) not in card
    assert "base_model" not in card


def test_other_copies_of_the_weights_are_left_out_with_a_warning(base: Path, edit: Edit, tmp_path: Path):
    kept = ["1_Pooling/config.json", "2_Dense/model.safetensors", ".gitattributes"]
    left = [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.fp16.safetensors",
        "original/consolidated.00.pth",
    ]
    quiet = [".git/HEAD", "unmerge.json"]
    for name in (*kept, *left, *quiet):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_bytes(b"{}")
    with pytest.warns(UnmergeWarning, match="were not copied: they hold weights") as record:
        edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert all(name in str(record[0].message) for name in left)
    assert not {*left, *quiet} & {*names_in(tmp_path / "edited")}
    assert {*kept} <= {*names_in(tmp_path / "edited")}


def test_shards_beside_one_file_are_old_copies(base: Path, edit: Edit, tmp_path: Path):
    save_file(tensors_in(base), base / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UnmergeWarning, match=r"model-00001-of-.*were not copied"):
        edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    weights = [name for name in names_in(tmp_path / "edited") if "safetensors" in name]
    assert weights == ["model.safetensors"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "edited")


def test_links_are_followed_as_in_the_cache_of_the_hub(base: Path, edit: Edit, tmp_path: Path):
    blobs = tmp_path / "blobs"
    shutil.copytree(base, blobs)
    for path in base.iterdir():
        path.unlink()
        path.symlink_to(blobs / path.name)
    for path in blobs.iterdir():
        path.chmod(0o444)
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert not any(path.is_symlink() for path in (tmp_path / "edited").iterdir())
    model = edit.apply(AutoModelForCausalLM.from_pretrained(blobs), 1.0)
    assert same_bits(tensors_in(tmp_path / "edited"), bits(model))


# ---- all or nothing


def test_a_full_disk_leaves_nothing(base: Path, edit: Edit, tmp_path: Path):
    with full_after(700), pytest.raises(OSError, match="too large"):
        edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_a_kill_leaves_no_half_written_directory(base: Path, edit: Edit, tmp_path: Path):
    edit.save(tmp_path / "edit")
    code = (
        "import os, signal, sys, unmerge\n"
        "from unmerge.interop import checkpoints\n"
        "real, count = checkpoints.rewritten, 0\n"
        "def rewritten(*given):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*given)\n"
        "checkpoints.rewritten = rewritten\n"
        "base, edit, target = sys.argv[1:]\n"
        "unmerge.edit_checkpoint(base, unmerge.Edit.load(edit), 1.0, target)\n"
    )
    run = [sys.executable, "-c", code, str(base), str(tmp_path / "edit"), str(tmp_path / "edited")]
    assert subprocess.run(run, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -signal.SIGKILL
    assert not (tmp_path / "edited").exists()
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert (tmp_path / "edited" / "README.md").is_file()


def test_an_empty_directory_is_filled(base: Path, edit: Edit, tmp_path: Path):
    (tmp_path / "edited").mkdir()
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert (tmp_path / "edited" / "config.json").is_file()


# ---- wrong input


def refused(kind: type[Exception], says: str, base: Path, edit: Edit, target: Path, alpha: Any = 1.0, **options: Any):
    with pytest.raises(kind, match=says):
        edit_checkpoint(base, edit, alpha, target, **options)
    assert not target.exists() or target == base or not any(target.glob("*.safetensors"))


def test_the_target_must_be_free(base: Path, edit: Edit, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    refused(FileError, "is not empty", base, edit, tmp_path / "full")
    (tmp_path / "file").write_text("")
    refused(FileError, "is a file or a link", base, edit, tmp_path / "file")
    refused(FileError, "which stays as it is", base, edit, base)
    refused(FileError, "which stays as it is", base, edit, base / "edited")


def test_strengths_are_checked(base: Path, edit: Edit, tmp_path: Path):
    refused(EditError, "recommends no strength", base, edit, tmp_path / "edited", alpha=None)
    refused(EditError, "alpha=-1", base, edit, tmp_path / "edited", alpha=-1)
    refused(EditError, "does not change the classifier", base, edit, tmp_path / "edited", head_alpha=1.0)


def test_a_strength_beyond_the_type_is_refused(tmp_path: Path):
    saved_decoder(tmp_path / "base", dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto").eval().float()
    refused(EditError, "infinite in its type", tmp_path / "base", language_edit(model), tmp_path / "edited", alpha=1e7)
    assert not (tmp_path / "edited").exists()


def test_other_weights_are_named_and_force_overrides(base: Path, edit: Edit, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    path = next(path for path in other.glob("*.safetensors") if "model.layers.1.mlp.up_proj.weight" in load_file(path))
    changed = load_file(path)
    changed["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(changed, path, metadata={"format": "pt"})
    refused(EditError, r"other weights of model\.layers\.1\.mlp\.up_proj\. ", other, edit, tmp_path / "edited")
    edit_checkpoint(other, edit, 1.0, tmp_path / "edited", force=True)
    model = AutoModelForCausalLM.from_pretrained(other)
    assert same_bits(tensors_in(tmp_path / "edited"), bits(edit.apply(model, 1.0, force=True)))


def test_twice_is_refused(base: Path, edit: Edit, tmp_path: Path):
    edit_checkpoint(base, edit, 1.0, tmp_path / "once")
    refused(EditError, "fitted on other weights", tmp_path / "once", edit, tmp_path / "twice")


def test_another_model_is_named_by_what_differs(base: Path, tmp_path: Path):
    gpt2 = language_edit(decoder("gpt2", dtype=torch.float32))
    refused(EditError, r"has no transformer\.h\.0\.attn\.c_attn\.weight", base, gpt2, tmp_path / "edited")
    wide = language_edit(decoder("llama", dtype=torch.float32, intermediate_size=14), PLAIN.but(layers="re:mlp"))
    refused(EditError, "gate_proj.weight.* have other shapes", base, wide, tmp_path / "edited", force=True)


def test_a_tied_head_is_not_in_the_file(tmp_path: Path):
    saved_decoder(tmp_path / "base", tied=True, dtype=torch.float32)
    untied = decoder("llama", dtype=torch.float32)
    edit = language_edit(untied, PLAIN.but(layers=["lm_head"]))
    refused(EditError, r"no lm_head\.weight.*tied there.*save_pretrained", tmp_path / "base", edit, tmp_path / "edited")


def test_quantised_weights_are_refused(base: Path, edit: Edit, tmp_path: Path):
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    state = {name: (100 * tensor).to(torch.int8) for name, tensor in tensors_in(base).items()}
    save_file(state, quantised / "model.safetensors")
    refused(EditError, r"torch\.int8.*quantised", quantised, edit, tmp_path / "edited", force=True)


def test_the_model_in_memory_is_not_touched(base: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    edit, before = language_edit(model), bits(model)
    inside = copy.deepcopy(edit.layers)
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert_close(bits(model), before, rtol=0, atol=0)
    assert all(torch.equal(inside[name].B, layer.B) for name, layer in edit.layers.items())


def test_an_index_of_metadata_alone_is_kept(base: Path, edit: Edit, tmp_path: Path):
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_parameters"] = 12345
    index.write_text(json.dumps(content))
    edit_checkpoint(base, edit, 1.0, tmp_path / "edited")
    assert json.loads((tmp_path / "edited" / index.name).read_text()) == content
