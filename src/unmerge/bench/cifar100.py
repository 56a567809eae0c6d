"""The paper's CIFAR-100 tables on the real images: every variant, baseline and control on every axis.

    python -m unmerge.bench.cifar100 --data DIR --task trees --fast          # one GPU
    python -m unmerge.bench.cifar100 --data DIR --task aquatic superclass:flowers class:wolf+bottle --fast --floor
    python -m unmerge.bench.cifar100 --data DIR --task trees --ablate rank lambda
    python -m unmerge.bench.cifar100 --data DIR --task trees --seed 2 --reference 0   # against seed 0's retraining
    python -m unmerge.bench.cifar100 --data DIR --task trees --device cpu --network tiny --subset 20 --epochs 2
    python -m unmerge.bench.cifar100 --data DIR --task trees --device cpu --network small --classes trees+flowers+wolf

A task is a superclass (trees, aquatic, vehicles, superclass:NAME), classes (class:NAME, several with +), "coherent"
(half of the images of the trees) or "random" (a twentieth of all images); several are run one after the other, with
one fine-tuned network. Networks and answers are kept in --cache after each stage, so that a run goes on where it
stopped and a reference is trained once. Writes TASK-INIT-SEED.json and .md in --out (SEED-by-REFERENCE where the
retrained model has another seed).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from unmerge.bench import cifar_data, comparison, paper
from unmerge.bench.ablations import ablated, inits
from unmerge.bench.caching import file_checksum, short_checksum
from unmerge.bench.cifar_options import parser
from unmerge.bench.images import Images
from unmerge.bench.machine import machine_name, versions
from unmerge.bench.networks import cifar_resnet, load_trunk, packaged_trunk
from unmerge.bench.notes import note
from unmerge.bench.options import tables_folder
from unmerge.bench.tasks import Task, task_of
from unmerge.bench.training import SCHEDULES, train
from unmerge.data.batches import progress
from unmerge.errors import DataError, UnmergeWarning, suggest
from unmerge.evaluation import Evaluation, Outputs, evaluate, outputs
from unmerge.evaluation.accuracy import accuracy
from unmerge.model.initial import Init
from unmerge.storage.files import load_weights, write_json, write_weights

AXES = ("accuracy", "entanglement", "membership", "fidelity", "decodability", "calibration")
FEATURES = 2500  # samples a split whose features are kept


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.backends.cudnn.benchmark = True
    data = cifar_data.load(options.data).to(options.device)
    if options.classes is not None:
        data = data.subset(data.classes_of(options.classes))
    if options.subset is not None:
        data = data.first(options.subset)
    is_whole = options.network == "resnet50" and options.subset is None and options.classes is None
    out = tables_folder(options, "cifar100", trial=not is_whole)
    benches = [Benchmark(options, data, task) for task in options.task]
    for bench in benches:
        bench.check()  # a name that is wrong is told before the first of them is trained
    for bench in benches:
        found = bench.run()
        name = f"{bench.label}-{options.init}-{bench.seeds}"
        write_json(out / f"{name}.json", found.to_dict())
        found.to_markdown(out / f"{name}.md")
        print(found["summary"])
        if "paper" in found.tables:
            print(found["paper"])
        print(f"\nwritten: {out / name}.json and .md")


class Benchmark:
    """One task, stage by stage; each leaves a file that the next run finds."""

    def __init__(self, options: argparse.Namespace, data: cifar_data.Cifar100, task: str) -> None:
        self.options, self.data, self.task = options, data, task
        schedule = SCHEDULES[options.init, options.fast]
        self.schedule = replace(schedule, epochs=options.epochs or schedule.epochs)
        self.label = task.replace(":", "-")  # in names of files
        self.reference = options.seed if options.reference is None else options.reference
        self.seeds = str(options.seed) if self.reference == options.seed else f"{options.seed}-by-{self.reference}"
        if options.init == "zero" and options.seed == _retraining_seed(self.reference):
            raise DataError(
                f"--seed {options.seed} starts from the weights that the retraining of --reference {self.reference} "
                f"started from, so the two would be alike. Type another, such as --seed {options.seed + 1}."
            )
        kept = f"{options.network}-{options.init}-{self.schedule.epochs}-{options.subset or 'all'}"
        made_with = dict(vars(self.schedule))
        if options.classes is not None:  # by what they are, however they were named
            kept, made_with["classes"] = f"{kept}-{len(data.classes)}-classes", data.classes
        self.trunk = load_weights(options.checkpoint or packaged_trunk()) if options.init == "pretrained" else {}
        if options.wrong is not None and "init" not in options.ablate:
            raise DataError(f"--wrong {options.wrong} is for the rows of --ablate init. Type --ablate init as well.")
        self.wrong = load_weights(options.wrong) if options.wrong is not None else {}
        self.folder = Path(options.cache) / f"{kept}-{short_checksum(self.trunk, made_with)}"

    def run(self) -> Evaluation:
        """All methods beside the reference, with what the paper has."""
        return self._judged(*self.answers())

    def answers(self) -> tuple[Task, dict[str, Outputs], dict[str, float], Outputs, Outputs | None]:
        """What every method's model answers and the seconds it took to make, the reference, and the noise floor."""
        forgotten, classes = cifar_data.requested(self.data, self.task)
        retain = self.data.train.where(~forgotten)
        own = self.options.seed
        model = self._network(f"finetuned-{own}", self.data.train, own, own)
        initial = "zero" if self.options.init == "zero" else self._initial(own).state_dict()
        task = replace(task_of(self.task, self.data, model, {}, forgotten, classes), init=initial)

        def reference(name: str, offset: int) -> Outputs:
            """What retraining answers; it is trained only where its answers are not kept."""
            network = f"retrained-{self.label}-{self.reference + offset}"
            seed = _retraining_seed(self.reference + offset)
            path = self.folder / f"{self.label}-{self.reference}" / f"{name}.safetensors"
            if not path.is_file():
                self._answer(self._network(network, retain, seed, self.reference), task, name, path)
            return Outputs.load(path)

        answers = reference("retrained", 0)
        floor = reference("retrained again", 1) if self.options.floor else None  # the next seed's
        shares = {name: accuracy(split.logits, split.labels) for name, split in answers.splits.items()}
        task = replace(task, retrained=shares)
        found: dict[str, Outputs] = {}
        seconds: dict[str, float] = {}
        rows = self._rows(task)
        for name, method in progress(rows.items(), f"{self.task}: rows", len(rows), "row"):
            found[name], seconds[name] = self._timed_outputs(name, method, task)
        return task, found, seconds, answers, floor

    def check(self) -> None:
        """That the request and its rows are known; nothing is trained for it."""
        _, classes = cifar_data.requested(self.data, self.task)
        init: Init = "zero" if self.options.init == "zero" else {}
        untrained = cifar_resnet(self.options.network, len(self.data.classes))
        self._rows(Task(self.task, untrained, {}, forget=(), retain=(), test=(), classes=classes, init=init))

    def _rows(self, task: Task) -> dict[str, Callable[[], nn.Module]]:
        """Name and maker of the rows that were asked for."""
        rows = dict(comparison.methods(task, seed=self.options.seed, published=True))
        for ablation in self.options.ablate:
            rows |= dict(inits(task, *self._stranger()) if ablation == "init" else ablated(task, ablation))
        unknown = [name for name in self.options.only or () if name not in rows]
        if unknown:
            raise DataError(f"--task {self.task} has no row {unknown[0]!r}. {suggest(unknown[0], rows)}")
        return {name: rows[name] for name in self.options.only or rows}

    def _judged(
        self,
        task: Task,
        found: dict[str, Outputs],
        seconds: dict[str, float],
        reference: Outputs,
        floor: Outputs | None,
    ) -> Evaluation:
        evaluation = evaluate(
            found, reference, task.splits, AXES, floor, seed=self.options.seed, device=self.options.device
        )
        evaluation = comparison.with_seconds(evaluation, seconds)
        tables = dict(evaluation.tables)
        published = paper.beside(self.task, self.options.init, tables["accuracy"])
        if published is not None and self.options.classes is None:
            tables["paper"] = published
        settings = {
            **evaluation.settings,
            "task": self.task,
            "init": self.options.init,
            "reference": self.reference,
            "network": self.options.network,
            "schedule": vars(self.schedule),
            "classes": self.options.classes,
            "subset": self.options.subset,
            "wrong": None if self.options.wrong is None else str(self.options.wrong),
            "versions": versions(),
            "device": machine_name(self.options.device),
        }
        return replace(evaluation, tables=tables, settings=settings)

    def _initial(self, seed: int, trunk: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The weights that training starts from, or those that another trunk would give it."""
        torch.manual_seed(seed)
        model: nn.Module = cifar_resnet(self.options.network, len(self.data.classes)).to(self.options.device)
        if trunk or self.trunk:
            load_trunk(model, trunk or self.trunk)
        return model

    def _stranger(self) -> tuple[str, Callable[[], Mapping[str, Tensor]]]:
        """Weights of a network of the same form from other data: those named, or trained on half of the classes."""
        own, path = self.options.seed, self.options.wrong
        if path is not None:  # a name of its own for each file, since rows are kept by name
            return f"wrong ({path.stem} {file_checksum(path)})", lambda: self._initial(own, self.wrong).state_dict()
        half = self.data.train.where(self.data.train.labels < len(self.data.classes) // 2)
        return "wrong", lambda: self._network(f"first-half-{own}", half, own + 7, own).state_dict()

    def _network(self, name: str, images: Images, seed: int, start_seed: int) -> nn.Module:
        """A network trained with a seed; `start_seed` is that of the head which a pretrained trunk gets."""
        path = self.folder / f"{name}.safetensors"
        # One pretrained start for all, as fine-tuning and retraining have; from scratch each has its own.
        model = self._initial(start_seed if self.options.init == "pretrained" else seed)
        if path.is_file():
            model.load_state_dict(load_weights(path))
            return model.eval()
        start = time.perf_counter()
        settings = vars(self.schedule)
        train(model, images, seed=seed, what=name, **settings)
        write_weights(path, model.state_dict())
        note(f"{name}: trained in {time.perf_counter() - start:.0f} s")
        return model

    def _answer(self, model: nn.Module, task: Task, name: str, path: Path) -> None:
        """Keep what a model answers to all splits."""
        found = outputs(model, task.splits, keep_features=FEATURES, forward=task.forward, name=name)
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path, half=True)

    def _timed_outputs(self, name: str, make: Callable[[], nn.Module], task: Task) -> tuple[Outputs, float]:
        """A row's answers and the seconds that it took to make, which are kept together."""
        path = self.folder / f"{self.label}-{self.seeds}" / f"{name}.safetensors"
        record = path.with_name(f"{name}.json")
        if not (path.is_file() and record.is_file()):
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnmergeWarning)
                model = make()
            if self.options.device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            self._answer(model, task, name, path)
            write_json(record, {"seconds": seconds})
            note(f"{name}: {seconds:.2f} s")
        return Outputs.load(path), json.loads(record.read_text())["seconds"]


def _retraining_seed(seed: int) -> int:
    """The seed that the retrained model of a seed is trained with: not that of the fine-tuned one."""
    return seed + 1


if __name__ == "__main__":
    main()
