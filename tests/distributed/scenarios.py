"""What the processes of the tests do. Each function runs in one process too, which gives the expected result."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unmerge
from decoders import decoder, padded, sentences
from networks import Batch, batched, cnn, hf_vit, mlp, samples
from unmerge import Recipe, Statistics, collect, distributed, fit, search_alpha
from unmerge.collecting import reduction
from unmerge.distributed import messages
from unmerge.distributed.processes import OwnShare
from unmerge.errors import RankError
from unmerge.evaluation import evaluate
from unmerge.evaluation.language import Encoded, score
from unmerge.measures import answer_probability
from unmerge.model.ledger import ledger_of
from unmerge.placement.sharded import whole
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint
from unmerge.sums.sketching import SketchedMoments

LABELS = [0, 1, 2, 3, 1, 2, 0, 3, 3, 1, 2, 0, 1, 1, 2, 3, 0]  # 17: no number of processes divides it


def images(labels: list[int] = LABELS, seed: int = 0, side: int = 6) -> Batch:
    return samples((3, side, side), labels, seed=seed, apart=1.5)


def dataset() -> Dataset[Any]:
    return TensorDataset(*images())


class Stream(IterableDataset[Any]):
    """Samples that come one after the other, the same in every process."""

    def __iter__(self) -> Iterator[Any]:
        return zip(*images(), strict=True)


class ByRank(Sampler[int]):
    """Every n-th sample, without a length; `repeated` more make the shares even, as many samplers do."""

    def __init__(self, repeated: bool = False) -> None:
        self._repeated = repeated

    def __iter__(self) -> Iterator[int]:
        yield from own_places()
        if self._repeated and len(own_places()) < len(range(0, len(LABELS), distributed.size())):
            yield 0


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(len(LABELS)))


class Broken:
    """Batches that end in an error, as often as they are read."""

    def __iter__(self) -> Iterator[Any]:
        return _broken()


def own_places() -> range:
    """What a person who deals samples out by hand gives to this process."""
    return range(distributed.rank(), len(LABELS), distributed.size())


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(distributed.rank())

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, 6, 6, generator=self._generator).double(), LABELS[index]


def numbers(statistics: Statistics) -> dict[str, Any]:
    """All that the statistics hold, in a form that does not depend on pivots."""
    found: dict[str, Any] = {"samples": statistics.samples, "classes": list(statistics.classes)}
    found["class_samples"] = list(statistics.class_samples)
    for name, layer in statistics.layers.items():
        found[f"{name} rows"] = layer.moments.n
        found[f"{name} mean"] = layer.moments.mean
        found[f"{name} scatter"] = layer.moments.scatter
        found[f"{name} class rows"], found[f"{name} class sums"] = layer.class_rows, layer.class_sums
        found |= {f"{name} class {place}": part.scatter for place, part in layer.class_moments.items()}
        if layer.sample is not None:
            found[f"{name} sample"] = layer.sample
    return found


def tensors(edit: unmerge.Edit) -> dict[str, Tensor]:
    """What the edit takes from each weight (B and Q alone may differ in sign), and its constants."""
    found = {f"{name} change": layer.B @ layer.Q.mT for name, layer in edit.layers.items()}
    found |= {f"{name} shift": layer.shift for name, layer in edit.layers.items() if layer.shift is not None}
    return found


# Each gives all samples once, whatever the number of processes.


def a_list() -> dict[str, Any]:
    return numbers(collect(cnn(dtype=torch.float32), [_single(batch) for batch in batched(images(), 3)]))


def full_classes() -> dict[str, Any]:
    return numbers(collect(cnn(), batched(images(), 3), per_class="full"))


def a_sample() -> dict[str, Any]:
    return numbers(collect(cnn(), batched(images(), 3), sample=20, seed=5))


def the_first_rows() -> dict[str, Any]:
    return numbers(collect(cnn(), batched(images(), 3), max_points=37, per_class="full"))


def fewer_batches_than_processes() -> dict[str, Any]:
    return numbers(collect(cnn(), [images()], per_class="full", sample=9))


def without_labels() -> dict[str, Any]:
    return numbers(collect(mlp(), [images()[0].flatten(1)[:, :6].split(4)[place] for place in range(5)]))


def shuffled() -> dict[str, Any]:
    torch.manual_seed(distributed.rank())  # each process would draw an order of its own
    return numbers(collect(cnn(), DataLoader(dataset(), batch_size=2, shuffle=True)))


def with_a_worker() -> dict[str, Any]:
    return numbers(collect(cnn(), DataLoader(dataset(), batch_size=4, num_workers=1)))


def augmented() -> dict[str, Any]:
    """Inputs that no two reads give alike."""
    statistics = collect(cnn(), DataLoader(Augmented(), batch_size=4))
    return {"samples": statistics.samples, "class_samples": list(statistics.class_samples)}


def a_stream() -> dict[str, Any]:
    return numbers(collect(cnn(), DataLoader(Stream(), batch_size=4)))


def sampler() -> dict[str, Any]:
    if distributed.size() == 1:
        return numbers(collect(cnn(), DataLoader(dataset(), batch_size=2)))
    deal = DistributedSampler(dataset(), shuffle=True, seed=3)
    return numbers(collect(cnn(), DataLoader(dataset(), batch_size=2, sampler=deal)))


def dealt_by_a_sampler() -> dict[str, Any]:
    """By samplers that nobody but the user knows: of torch's, of their own, and a list of batches."""
    batches = [list(own_places()[start : start + 2]) for start in range(0, len(own_places()), 2)]
    loaders = {
        "subset": DataLoader(dataset(), batch_size=2, sampler=SubsetRandomSampler(own_places())),
        "own": DataLoader(dataset(), batch_size=2, sampler=ByRank()),
        "batches": DataLoader(dataset(), batch_sampler=batches, num_workers=1),
        "read once": DataLoader(dataset(), batch_sampler=iter(batches)),
    }
    return {name: numbers(collect(cnn(), loader)) for name, loader in loaders.items()}


def dealt_to_some() -> dict[str, Any]:
    """The last process has no sample."""
    chosen = {0: [4, 2, 9], 1: [7]} if distributed.size() == 3 else {0: [4, 2, 9, 7]}
    sampler = SubsetRandomSampler(chosen.get(distributed.rank(), []))
    return numbers(collect(cnn(), DataLoader(dataset(), sampler=sampler)))


def drawn_at_random() -> dict[str, Any]:
    """Other samples in each process, though nobody deals: as many as are drawn count."""
    torch.manual_seed(distributed.rank())
    weights, own = torch.ones(len(LABELS)), torch.Generator().manual_seed(distributed.rank())
    samplers = {
        "with replacement": RandomSampler(dataset(), replacement=True, num_samples=23),  # type: ignore[arg-type]
        "of a generator": RandomSampler(dataset(), num_samples=3, generator=own),  # type: ignore[arg-type]
        "weighted": WeightedRandomSampler(weights.tolist(), 11),
    }
    found = {name: collect(cnn(), DataLoader(dataset(), 2, sampler=sampler)) for name, sampler in samplers.items()}
    return {name: statistics.samples for name, statistics in found.items()}


def more_processes_than_samples() -> dict[str, Any]:
    few = TensorDataset(*images([1]))
    if distributed.size() == 1:
        return numbers(collect(cnn(), DataLoader(few)))
    return numbers(collect(cnn(), DataLoader(few, sampler=DistributedSampler(few))))


def accelerated() -> dict[str, Any]:
    from accelerate.data_loader import prepare_data_loader

    loader = prepare_data_loader(
        DataLoader(dataset(), batch_size=2, shuffle=True),
        num_processes=distributed.size(),
        process_index=distributed.rank(),
        put_on_device=False,
        even_batches=True,
    )
    return numbers(collect(cnn(), loader))


def own_shares() -> dict[str, Any]:
    """The first process has most, the last nothing."""
    batches = batched(images(), 3)
    shares = [batches] if distributed.size() == 1 else [batches[:4], batches[4:], *[[]] * 9][: distributed.size()]
    if distributed.size() == 2:
        shares = [batches, []]
    return numbers(collect(cnn(), OwnShare(shares[distributed.rank()]), sample=0, per_class="full"))


def classes_of_one_process_each() -> dict[str, Any]:
    batches = [images([label] * 3, seed=label) for label in (7, 2, 5, 9)]
    return numbers(collect(cnn(), batches))


# Whole requests.


def request(side: int = 6) -> tuple[list[Batch], list[Batch]]:
    return batched(images([1] * 7, side=side), 2), batched(images([0, 2, 3] * 8, seed=4, side=side), 5)


def mlp_request() -> tuple[list[Batch], list[Batch]]:
    lost, kept = (samples((6,), labels, seed=seed) for seed, labels in enumerate(([1] * 5, [0, 2, 3] * 4)))
    return [batched((inputs.float(), labels), 3) for inputs, labels in (lost, kept)]


def an_edit() -> dict[str, Tensor]:
    return tensors(fit(cnn(), *request(), init="zero", recipe=Recipe(skip_layers=0)))


RECIPES = {
    "default": Recipe(),
    "edited head": Recipe(head="edit"),
    **{
        basis: Recipe(basis=basis, head="edit")
        for basis in ("lda", "private-mean", "contrastive", "pca", "deflated-pca")
    },
    **{f"paper's {basis}": Recipe.paper(basis) for basis in ("pca", "cav-class", "cav-kmeans")},
}


def edits_in_single_precision() -> dict[str, Any]:
    """By every basis, of inputs that vary in some directions much less than in others."""
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        edit = fit(mlp((40, 32, 24, 5), torch.float32), *_uneven(), init="zero", recipe=recipe.but(skip_layers=0))
        found[name] = tensors(edit)
    return found


def edits_of_convolutions_in_single_precision() -> dict[str, Any]:
    forget, retain = ([_single(batch) for batch in part] for part in request())
    found: dict[str, Any] = {}
    for name in ("default", "edited head", "contrastive", "paper's pca"):
        model, recipe = cnn(width=16, dtype=torch.float32), RECIPES[name].but(skip_layers=0)
        found[name] = tensors(fit(model, forget, retain, init="zero", recipe=recipe))
    return found


def edits_of_dealt_samples_in_single_precision() -> dict[str, Any]:
    """By a DistributedSampler, so that other samples share a batch and others come first than in one process."""
    models = {
        "linear": _on_a_grid(mlp((40, 32, 24, 5), torch.float32)),
        "convolutions": cnn(width=16, dtype=torch.float32),
    }
    pictures = images([1] * 40), images([0, 2, 3] * 20, seed=4)
    parts = {"linear": _uneven(), "convolutions": [[_single(part)] for part in pictures]}
    found: dict[str, Any] = {}
    for kind, name in itertools.product(models, ("default", "edited head", "lda", "contrastive")):
        recipe = RECIPES[name].but(skip_layers=0)
        forget, retain = (_dealt(part) for part in parts[kind])
        found[f"{kind}, {name}"] = tensors(fit(models[kind], forget, retain, init="zero", recipe=recipe))
    return found


def edits_of_transformers_in_single_precision() -> dict[str, Any]:
    found: dict[str, Any] = {kind: _edit_of_decoder(kind, torch.float32, split=False) for kind in ("gpt2", "mixtral")}
    forget, retain = ([_single(batch) for batch in part] for part in request(side=8))
    edit = fit(hf_vit(torch.float32, classes=4), forget, retain, init="zero", recipe=Recipe(skip_layers=0))
    return found | {"vit": tensors(edit)}


def a_sketched_edit_in_single_precision() -> dict[str, Any]:
    model = mlp((40, 300, 5), torch.float32)
    edit = fit(model, *_uneven(), init="zero", recipe=Recipe(layers=["2"], head="edit"), memory="6MB")
    assert edit.provenance["plan"]["sketches"]
    return tensors(edit)


def the_same_bits() -> dict[str, Tensor]:
    edit = fit(cnn(), *request(), init="zero", recipe=Recipe(skip_layers=0))
    return {f"{name} {part}": getattr(layer, part) for name, layer in edit.layers.items() for part in ("B", "Q")}


def an_edit_with_a_verdict() -> dict[str, Any]:
    """Without labels: a random control is read of the retain data."""
    forget, retain = ([batch[0] for batch in part] for part in request())
    edit = fit(cnn(), forget, retain, init="zero", recipe=Recipe(skip_layers=0, rank=2))
    return tensors(edit) | {"verdict": edit.provenance["verdict"]["separability"]}


def a_verdict_of_dealt_samples() -> float:
    forget, retain = request()
    both = TensorDataset(torch.cat([batch[0] for batch in retain]))
    deal = DistributedSampler(both, shuffle=False) if distributed.size() > 1 else None
    loader = DataLoader(both, batch_size=2, sampler=deal)
    edit = fit(cnn(), [batch[0] for batch in forget], loader, init="zero", recipe=Recipe(skip_layers=0, rank=2))
    return edit.provenance["verdict"]["separability"]


def kmeans() -> dict[str, Tensor]:
    recipe = Recipe(basis="cav-kmeans", rank=2, skip_layers=0, max_points=40)
    return tensors(fit(mlp((6, 8, 4)), *_flat(request()), init="zero", recipe=recipe, on_verdict="ignore"))


def within_memory() -> dict[str, Tensor]:
    return tensors(fit(cnn(), *request(), init="zero", recipe=Recipe(skip_layers=0), memory="1035KB"))


def sketched() -> dict[str, Any]:
    """Of 300 inputs, in a bound that their Gram does not fit."""
    model, (forget, retain) = mlp((6, 300, 4)), _flat(request())
    kept = collect(model, retain, ["2"], memory="900KB", per_class="full")["2"]
    parts = {"all": kept.moments, **kept.class_moments}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        assert isinstance(part, SketchedMoments)
        found |= {f"{name} product": part.scatter_product(), f"{name} variance": part.variance}
    edit = fit(model, forget, retain, init="zero", recipe=Recipe(layers=["2"]), memory="6MB")
    return found | tensors(edit) | {"sketches": edit.provenance["plan"]["sketches"]}


def strengths() -> dict[str, Any]:
    model = _trained()
    forget, retain = request()
    edit = fit(model, forget, retain, init="zero", recipe=Recipe(skip_layers=0))
    plain = search_alpha(edit, model, forget, retain=retain, recalibrate=retain)
    scored = search_alpha(edit, model, forget, retain=retain, score="kodge")
    near = search_alpha(edit, model, forget, score="kl", reference=cnn(seed=3))
    own = search_alpha(edit, model, forget, metric=lambda changed, data: float(changed(data[0][0]).std()))
    return {name: found.to_dict() for name, found in (("a", plain), ("b", scored), ("c", near), ("d", own))}


def recalibrated() -> dict[str, Any]:
    """Also with a sample that is left over, in a share that has no other, and with the model in parts."""
    forget, retain = request()
    edit = fit(cnn(), forget, retain, init="zero", recipe=Recipe(skip_layers=0))
    single = (retain[0][0][:1], retain[0][1][:1])
    found: dict[str, Any] = {}
    for name, batches in (("all", retain), ("left over", [retain[0], single]), ("later", [*retain[:3], single])):
        for split in (False, True):
            model = cnn()
            if split and distributed.size() > 1:
                from torch.distributed.fsdp import fully_shard

                for part in (model.conv1, model.conv2, model):
                    fully_shard(part)
            edit.apply(model, 1.0, recalibrate=batches)
            found[f"{name}, {split=}"] = _state(model)
    return found


def refitted() -> dict[str, Any]:
    """Also where a process has no batch, or another number of them, and with the model in parts."""
    forget, retain = request()
    edit = fit(cnn(), forget, retain, init="zero", recipe=Recipe(skip_layers=0, refit=0.1))
    found: dict[str, Any] = {}
    for count, split in ((1, False), (5, False), (1, True), (5, True)):
        model = cnn()
        if split and distributed.size() > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        edit.apply(model, 1.0, recalibrate=retain[:count])
        assert f"{edit.head}.weight" in ledger_of(model).entries[-1].recalibrated
        found[f"{count} batches, {split=}"] = _state(model)
        edit.revert(model)
        edit.apply(model, 1.0, recalibrate=retain[:count], forget=forget)
        found[f"{count} batches and forgotten ones, {split=}"] = _state(model)
    return found


def evaluated() -> dict[str, Any]:
    forget, retain = request()
    splits = {"forget": forget, "retain": retain, "test": batched(images(seed=9), 4)}
    axes = ["accuracy", "entanglement", "fidelity", "relearning", "calibration"]
    found = evaluate({"model": cnn(seed=1)}, cnn(seed=2), splits, axes, draws=20, keep_features=6)
    return found.to_dict()["tables"]


def written() -> dict[str, Any]:
    """Of several processes the first writes."""
    edit = fit(cnn(), *request(), init="zero", recipe=Recipe(skip_layers=0))
    with tempfile.TemporaryDirectory() as folder:
        edit.save(folder)
        collect(cnn(), request()[0]).save(Path(folder) / "statistics.safetensors")
        return {"files": sorted(os.listdir(folder)) if distributed.is_first() else os.listdir(folder)}


def exported() -> dict[str, Any]:
    """An adapter, a checkpoint, a diagnosis and an evaluation: all have what they say, the first writes it."""
    model, (forget, retain) = mlp(dtype=torch.float32), mlp_request()
    edit = fit(model, forget, retain, init="zero", recipe=Recipe(skip_layers=0, head="edit"))
    with tempfile.TemporaryDirectory() as name:
        folder, base = Path(name), Path(name) / "base"
        base.mkdir()
        save_file(model.state_dict(), base / "model.safetensors")
        survived = unmerge.edit_checkpoint(base, edit, 1.0, folder / "edited")
        if distributed.is_first():  # which may also be asked alone
            assert unmerge.edit_checkpoint(base, edit, 1.0, folder / "again") == survived
        edit.to_peft(folder / "adapter", 1.0, base=model)
        words = unmerge.diagnose(forget, retain, model).to_json(folder / "diagnosis.json")
        judged = evaluate({"model": model}, None, {"forget": forget, "retain": retain}, ["accuracy"], draws=2)
        judged.to_json(folder / "evaluation.json")
        judged.to_csv(folder / "evaluation.csv")
        return {"files": sorted(os.listdir(folder)), "survived": survived, "words": len(words) > 100}


# A model whose weights are spread over the processes.


def sharded() -> dict[str, Any]:
    """Also with shares of different length: seven batches."""
    model, (forget, retain) = _blocks(), _flat(request())
    found: dict[str, Any] = {"weights": fingerprint(state_of(model))}
    for count in (1, 3):  # so few batches that a process has none, or fewer than another
        found[f"statistics of {count}"] = numbers(collect(model, retain[:count]))
    edit = fit(model, forget, retain, init=_blocks(seed=1, split=False), recipe=Recipe(skip_layers=0), check_init=False)
    found |= tensors(edit)
    before = _state(model)
    inputs = retain[0][0]
    with torch.no_grad():
        plain = model(inputs)
        edit.apply(model, 1.5)
        found["edited"] = model(inputs)
        edit.revert(model)
        assert model(inputs).equal(plain)
    assert all(value.equal(before[name]) for name, value in _state(model).items())
    found["alpha"] = search_alpha(edit, model, forget, retain=retain).to_dict()
    splits = {"forget": forget, "retain": retain}
    if distributed.size() > 1:
        relearned = evaluate({"model": model}, None, splits, ["relearning"], draws=10)
        assert "spread over processes" in relearned.missing["relearning"]
    evaluation = evaluate({"model": model}, None, splits, ["accuracy", "calibration"], draws=10, keep_features=0)
    return found | {"evaluation": evaluation.to_dict()["tables"]}


def sharded_decoders() -> dict[str, Any]:
    return {kind: _edit_of_decoder(kind, torch.float64) for kind in ("gpt2", "mixtral")}


def sharded_decoders_in_single_precision() -> dict[str, Any]:
    return {kind: _edit_of_decoder(kind, torch.float32) for kind in ("gpt2", "mixtral")}


# A language model.


def answers() -> dict[str, Any]:
    """Every process looks at all texts where there is no share of them."""
    model = decoder("llama")
    found = score(model, [Encoded(text[:3].tolist(), text[3:].tolist()) for text in sentences([9, 5, 7, 8, 6])])
    texts = [padded(sentences([8, 6], seed=seed)) for seed in range(5)]
    for batch in texts:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    edit = fit(model, texts[:2], texts[2:], init="zero", on_verdict="ignore")
    search = search_alpha(edit, model, texts[:2], 0.03, texts[2:], max_drop=1.0, metric=answer_probability)
    return {"scores": found.tensors(), "search": search.to_dict()}


# What goes wrong.


def other_weights() -> None:
    collect(cnn(seed=distributed.rank()), batched(images(), 3))


def other_data() -> None:
    collect(cnn(), batched(images(seed=distributed.rank()), 3))


def other_datasets() -> None:
    """Dealt out by hand: of the same length, but each process has samples of its own."""
    inputs, labels = images()
    collect(cnn(), DataLoader(TensorDataset(inputs[distributed.rank() :][:14], labels[:14]), batch_size=2))


def other_kinds() -> None:
    collect(cnn(), batched(images(), 3) if distributed.is_first() else DataLoader(dataset()))


def one_failure() -> None:
    collect(cnn(), OwnShare(_broken() if distributed.rank() == 1 else batched(images(), 3)))


def one_failure_of_all() -> None:
    """In a share of common data, and in the middle of a fit."""
    forget, retain = request()
    if distributed.rank() == 1:
        retain[1][0][0] = float("nan")
    fit(cnn(), forget, retain, init="zero")


def one_failure_while_applying() -> None:
    """In the data that BatchNorms are re-estimated on; who catches it must not leave the others waiting."""
    model, (forget, retain) = cnn(), request()
    edit = fit(model, forget, retain, init="zero", recipe=Recipe(skip_layers=0))
    edit.apply(model, 1.0, recalibrate=OwnShare(Broken() if distributed.rank() == 1 else retain))


def one_failure_while_diagnosing() -> None:
    forget, retain = request()
    unmerge.diagnose(forget, OwnShare(Broken() if distributed.rank() == 1 else retain), cnn())


def one_that_cannot_travel() -> None:
    """The first samples go to all processes."""
    collect(mlp(), [{"input": images()[0].flatten(1)[:, :6], "extra": lambda: 0}], forward=_of_input)


def one_failure_while_adding() -> None:
    """In the middle of the sum over the processes, where the others wait for tensors and not for a word."""
    messages.PATIENCE = timedelta(seconds=1)
    if distributed.rank() == 1:
        reduction.add_up_ = _out_of_memory  # type: ignore[assignment]
    collect(cnn(), batched(images(), 3))


def nothing_at_all() -> None:
    collect(cnn(), OwnShare([]))


def wrapped() -> None:
    collect(nn.parallel.DistributedDataParallel(cnn()), batched(images(), 3))


def split_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (distributed.size(),))
    collect(parallelize_module(mlp(), mesh, {"0": ColwiseParallel()}), _flat(request())[0])


def first_rows_of_shares() -> None:
    collect(cnn(), OwnShare(batched(images(), 3)), max_points=4)


def an_accelerated_stream() -> None:
    from accelerate.data_loader import prepare_data_loader

    places = {"num_processes": distributed.size(), "process_index": distributed.rank()}
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=2), put_on_device=False, **places)
    collect(cnn(), loader)


def other_sampler() -> None:
    deal = DistributedSampler(dataset(), num_replicas=7, rank=distributed.rank())
    collect(cnn(), DataLoader(dataset(), sampler=deal))


def other_epoch() -> None:
    deal = DistributedSampler(dataset())
    deal.set_epoch(distributed.rank())
    collect(cnn(), DataLoader(dataset(), sampler=deal))


def dealt_with_repetition() -> None:
    collect(cnn(), DataLoader(dataset(), batch_size=2, sampler=ByRank(repeated=True)))


def endless() -> None:
    collect(cnn(), DataLoader(dataset(), batch_size=2, sampler=Endless()))


def by_itself() -> dict[str, Any]:
    """One process works, the others do not call."""
    if not distributed.is_first():
        return {}
    with distributed.alone():
        return numbers(collect(cnn(), batched(images(), 3)))


def an_end() -> dict[str, Any]:
    """The last process ends without a word while the others collect; returns how long these took to see it."""
    start = time.monotonic()
    try:
        collect(cnn(), _ending(batched(images(), 1)))
    except RankError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {}


def _out_of_memory(tensor: Tensor) -> Tensor:
    raise MemoryError("nothing is left")


def _of_input(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["input"])


def _ending(batches: list[Batch]) -> Iterator[Batch]:
    for place, batch in enumerate(batches):
        if place == 8 and distributed.rank() == distributed.size() - 1:
            os._exit(1)
        yield batch


def _broken() -> Iterator[Batch]:
    yield images()
    raise ValueError("the disk is gone")


def _single(batch: Batch) -> Batch:
    return batch[0].float(), batch[1]


def _on_a_grid(model: nn.Module) -> nn.Module:
    """The model with coarse activations, so that batches which a processor rounds otherwise have the same."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda _, __, output: (output * 256).round() / 256)
    return model


def _dealt(batches: list[Batch]) -> DataLoader[Any]:
    """The samples in batches of 20, dealt out where there are several processes."""
    every: Dataset[Any] = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    deal = DistributedSampler(every, shuffle=False) if distributed.size() > 1 else None
    return DataLoader(every, batch_size=20, sampler=deal)


def _uneven() -> tuple[list[Batch], list[Batch]]:
    """Batches to forget and to retain."""
    scale = torch.logspace(0, -3, 40)
    parts = samples((40,), [1, 4] * 75, seed=2), samples((40,), [0, 2, 3] * 150, seed=3)
    forget, retain = (
        [((inputs.float() + 1) * scale, labels) for inputs, labels in batched(part, 20)] for part in parts
    )
    return forget, retain


def _flat(parts: tuple[list[Batch], list[Batch]]) -> list[list[Batch]]:
    return [[(inputs.flatten(1)[:, :6].contiguous(), labels) for inputs, labels in part] for part in parts]


def _trained() -> nn.Module:
    """A classifier that is right on most samples."""
    torch.manual_seed(0)
    model = cnn(seed=1)
    inputs, labels = (torch.cat(parts) for parts in zip(*request()[0], *request()[1], strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def _blocks(seed: int = 0, split: bool = True) -> nn.Module:
    """An MLP, in several processes with the weights of its blocks and of the rest spread over them."""
    model = mlp((6, 8, 7, 4), dtype=torch.float32, seed=seed).double()
    if split and distributed.size() > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    return model


def _edit_of_decoder(kind: str, dtype: torch.dtype, split: bool = True) -> dict[str, Tensor]:
    """The edit of a decoder, in several processes with its blocks spread over them."""
    model, initial = decoder(kind, dtype=dtype), decoder(kind, dtype=dtype, seed=1)
    if split and distributed.size() > 1:
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h if kind == "gpt2" else model.model.layers:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    forget = [padded(sentences([7, 5, 9, 6], seed=seed, high=12)) for seed in range(6)]
    retain = [padded(sentences([8, 9, 6, 7], seed=100 + seed)) for seed in range(13)]
    recipe = Recipe(skip_layers=0)
    return tensors(fit(model, forget, retain, init=initial, recipe=recipe, check_init=False, on_verdict="ignore"))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value.detach()).clone() for name, value in state_of(model).items()}
