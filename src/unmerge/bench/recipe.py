"""The untuned recipe against a grid over rank, depth and lambda: does it need tuning?

    python -m unmerge.bench.recipe                              # digits, a few minutes on two cores
    python -m unmerge.bench.recipe --cifar100 DIR --device cuda # and twenty classes of CIFAR-100, on a GPU

Every request is fitted once from the same statistics for each cell, with the forgotten rows of the head removed and
without; alpha is what the edit recommends, else searched on the forget set alone. Beside them stand the un-edited model
and a logit mask: accuracy alone cannot tell a mask from unlearning, the feature gap can. Writes recipe.json and
recipe.md.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

import unmerge
from unmerge.baselines import LogitMask
from unmerge.bench import cifar_data, tasks
from unmerge.bench.tasks import Task
from unmerge.errors import UnmergeWarning
from unmerge.evaluation import Outputs, outputs
from unmerge.evaluation.accuracy import accuracy, tug_of_war
from unmerge.evaluation.entanglement import mmd
from unmerge.model.layers import candidates
from unmerge.storage.files import write_json
from unmerge.tables import markdown_table, text_table

RANKS, LAMBDAS = (8, 16, 32), (1.0, 10.0, 50.0)
FEATURES = 2500  # samples a split whose features are compared
SUBSET = "trees+aquatic_mammals+vehicles_1+flowers"  # of CIFAR-100
CIFAR_REQUESTS = ("trees", "dolphin")
COLUMNS = ["", "forget", "retain", "test", "ToW", "MMD gap"]


@dataclass(frozen=True)
class Result:
    """One model of a task beside the retrained one."""

    task: str
    mode: str  # "removed" rows or "edit": none removed
    cell: str
    forget: float
    retain: float
    test: float
    tow: float
    gap: float
    alpha: float | None = None

    def row(self) -> list[str]:
        name = self.cell if self.alpha is None else f"{self.cell}, alpha {self.alpha:g}"
        shares = [f"{100 * share:.2f}" for share in (self.forget, self.retain, self.test)]
        return [name, *shares, f"{self.tow:.4f}", f"{self.gap:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar100", type=Path, help="folder with CIFAR-100 (default: digits only)")
    parser.add_argument("--device", default="cpu", help="for CIFAR-100 (default: cpu)")
    parser.add_argument("--epochs", type=int, default=30, help="of training on CIFAR-100 (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for recipe.json and recipe.md")
    options = parser.parse_args()
    found: list[Result] = []
    verdicts: dict[str, Any] = {}
    for task in _tasks(options):
        verdicts[task.name] = asdict(
            unmerge.diagnose(task.forget, task.retain, task.model, forward=task.forward).verdict
        )
        print(f"{task.name}: {verdicts[task.name]['kind']}, S/S_rand {verdicts[task.name]['ratio']:.1f}\n", flush=True)
        if not task.classes:
            continue
        for mode in ("removed", "edit"):
            found += compared(task, mode)
            print(text_table(COLUMNS, _rows(found, task.name, mode)) + "\n", flush=True)
    write_json(options.out / "recipe.json", {"results": [asdict(result) for result in found], "verdicts": verdicts})
    (options.out / "recipe.md").write_text(_markdown(found, verdicts))


def compared(task: Task, mode: str) -> list[Result]:
    """The controls, the untuned recipe and every cell of the grid."""
    assert isinstance(task.retrained, nn.Module), "its accuracies do not tell what its features are"
    reference = _outputs(task.retrained, task)
    masked = LogitMask(task.model, list(task.classes))
    found = [
        _result(task, mode, "retrained", reference, reference),
        _result(task, mode, "un-edited", _outputs(task.model, task), reference),
        _result(task, mode, "logit mask", _outputs(masked, task), reference),
    ]
    forget = unmerge.collect(task.model, task.forget, forward=task.forward, what="forget")
    retain = unmerge.collect(task.model, task.retain, forget, forward=task.forward, what="retain")
    head = "auto" if mode == "removed" else "edit"
    for name, recipe in [("default", unmerge.Recipe(head=head)), *_grid(task.model, head)]:
        edit = unmerge.fit(task.model, forget, retain, init="zero", recipe=recipe)
        options: dict[str, Any] = {"recalibrate": task.recalibration, "forward": task.forward}
        with warnings.catch_warnings():
            # That a cell does not forget shows in the table, and the head alone has no BatchNorm behind it.
            warnings.simplefilter("ignore", UnmergeWarning)
            alpha = edit.alpha
            if alpha is None:
                alpha = unmerge.search_alpha(edit, task.model, task.forget, **options).alpha
            with edit.applied(task.model, alpha, forget=task.forget, **options):
                found.append(_result(task, mode, name, _outputs(task.model, task), reference, alpha))
    return found


def _tasks(options: argparse.Namespace) -> Iterator[Task]:
    yield from tasks.digit_tasks(seed=options.seed)
    yield tasks.random_digits(100, options.seed)
    if options.cifar100 is not None:
        whole = cifar_data.load(options.cifar100)
        data = whole.subset(whole.classes_of(SUBSET)).to(options.device)
        settings = ("resnet18", len(data.classes), options.epochs)
        model = tasks.cifar_classifier(data.train, *settings, options.seed, "training")
        for request in CIFAR_REQUESTS:
            classes = data.classes_of(request)
            retained = data.train.without(classes)
            retrained = tasks.cifar_classifier(retained, *settings, options.seed + 1, f"retraining without {request}")
            yield tasks.task_of(request, data, model, retrained, data.train.has(classes), tuple(classes))


def _grid(model: nn.Module, head: str) -> Iterator[tuple[str, unmerge.Recipe]]:
    """Depths from the classifier alone to everything, ranks of what is protected, weights of its protection."""
    count = len(candidates(model)) - 1
    depths = {count: "head only", count - max(1, count // 4): "last quarter", count // 2: "last half", 0: "all layers"}
    for skip, depth in depths.items():
        for basis in ("blend", "private-mean"):  # which protect without a rank or a weight
            yield f"{basis}, {depth}", unmerge.Recipe(basis=basis, skip_layers=skip, head=head)
    for times in (0.0, 0.5, 2.0) if head == "edit" else ():
        yield f"blend, last quarter, outputs lowered x{times:g}", unmerge.Recipe(head=head, head_strength=times)
    for (skip, depth), rank, lam in itertools.product(depths.items(), RANKS, LAMBDAS):
        if rank == 16 or depth == "last quarter":
            recipe = unmerge.Recipe(basis="lda", skip_layers=skip, retain_rank=rank, lam=lam, head=head)
            yield f"lda, {depth}, rank {rank}, lambda {lam:g}", recipe
    for basis in ("pca", "contrastive"):
        for rank in (4, 16):
            yield f"{basis}, last quarter, rank {rank}, lambda 10", unmerge.Recipe(basis=basis, rank=rank, head=head)


def _outputs(model: nn.Module, task: Task) -> Outputs:
    return outputs(model, task.splits, keep_features=FEATURES, forward=task.forward)


def _result(task: Task, mode: str, cell: str, found: Outputs, reference: Outputs, alpha: float | None = None) -> Result:
    shares, target = (
        {name: accuracy(split.logits, split.labels) for name, split in each.splits.items()}
        for each in (found, reference)
    )
    own, retrained = (_distance(each) for each in (found, reference))
    tow = tug_of_war(shares, target)
    return Result(task.name, mode, cell, **shares, tow=tow, gap=abs(own - retrained) / abs(retrained), alpha=alpha)


def _distance(found: Outputs) -> float:
    forget, retain = (found.splits[name].features for name in ("forget", "retain"))
    assert forget is not None
    assert retain is not None
    size = min(len(forget), len(retain))
    return mmd(forget[:size].double(), retain[:size].double())[0]


def _rows(found: list[Result], task: str, mode: str, limit: int = 5) -> list[list[str]]:
    """The controls, the default, and the best cells of the grid."""
    here = [result for result in found if result.task == task and result.mode == mode]
    cells = sorted(here[4:], key=lambda result: -result.tow)
    return [result.row() for result in [*here[:4], *cells[:limit]]]


def _markdown(found: list[Result], verdicts: dict[str, Any]) -> str:
    parts = []
    for task, mode in dict.fromkeys((result.task, result.mode) for result in found):
        title = "rows removed from the head" if mode == "removed" else "no row removed"
        parts.append(f"### {task}: {title}\n\n" + markdown_table(COLUMNS, _rows(found, task, mode)))
    rows = [
        [name, found["kind"], f"{found['separability']:.3f}", f"{found['ratio']:.1f}", f"{found['shift']:.1f}"]
        for name, found in verdicts.items()
    ]
    parts.append("### Verdicts\n\n" + markdown_table(["request", "verdict", "S", "S/S_rand", "mean shift"], rows))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
