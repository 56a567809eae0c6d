"""The paper's own CIFAR-100 figures (its per-superclass tables, ResNet-50), to stand beside ours."""

from __future__ import annotations

from unmerge.evaluation import Column, Figure, Table

COLUMNS = ("forget", "retain", "test", "ToW")
ROWS = ("NegGrad+", "random label", "SalUn", "NegTV", "NegMerge", "Kodge et al.")
OURS = ("paper pca", "paper cav-kmeans", "paper cav-class")

# Task and init: forget, retain and test accuracy in %, ToW; in the order of the rows above.
PUBLISHED: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {
    ("trees", "pretrained"): [
        (0.36, 97.21, 74.48, 0.9089), (12.24, 99.94, 80.62, 0.8768), (4.32, 99.92, 80.64, 0.9560),
        (1.72, 96.87, 74.59, 0.8943), (2.60, 97.50, 75.24, 0.8983), (0.16, 99.67, 78.25, 0.9712),
        (0.08, 99.80, 79.60, 0.9868), (0.00, 99.40, 77.75, 0.9652), (0.12, 98.82, 76.07, 0.9418),
    ],
    ("trees", "zero"): [
        (4.40, 96.04, 66.05, 0.8553), (15.44, 99.96, 74.00, 0.8364), (3.08, 99.94, 74.14, 0.9571),
        (1.40, 95.60, 66.19, 0.8795), (1.96, 96.50, 66.91, 0.8895), (0.08, 99.01, 70.05, 0.9613),
        (0.12, 98.75, 70.31, 0.9609), (0.68, 99.83, 72.07, 0.9834), (1.12, 99.87, 72.65, 0.9851),
    ],
    ("aquatic", "pretrained"): [
        (0.56, 95.34, 73.16, 0.8763), (3.36, 99.94, 80.26, 0.9613), (5.52, 99.98, 81.05, 0.9417),
        (4.68, 98.00, 75.64, 0.8866), (7.24, 98.68, 76.46, 0.8763), (0.44, 99.67, 78.54, 0.9705),
        (0.20, 99.72, 79.20, 0.9799), (0.20, 99.71, 79.16, 0.9795), (1.40, 99.52, 77.95, 0.9540),
    ],
    ("aquatic", "zero"): [
        (5.72, 97.18, 69.02, 0.8819), (3.40, 99.97, 74.55, 0.9491), (4.32, 99.97, 74.69, 0.9387),
        (5.72, 96.93, 68.82, 0.8778), (6.32, 97.18, 68.85, 0.8747), (0.72, 99.00, 70.68, 0.9623),
        (0.72, 95.80, 66.66, 0.8929), (0.56, 99.66, 72.57, 0.9891), (0.16, 99.81, 73.48, 0.9900),
    ],
    ("vehicles", "pretrained"): [
        (0.00, 97.38, 73.82, 0.9125), (12.12, 99.94, 80.05, 0.8777), (8.52, 99.91, 79.87, 0.9117),
        (0.40, 90.43, 68.21, 0.7934), (0.44, 91.31, 68.85, 0.8066), (0.36, 98.82, 76.07, 0.9448),
        (0.04, 99.89, 79.14, 0.9887), (0.04, 99.78, 78.09, 0.9771), (0.56, 99.32, 76.68, 0.9537),
    ],
    ("vehicles", "zero"): [
        (3.48, 97.46, 67.56, 0.9021), (9.36, 99.96, 73.29, 0.8920), (4.36, 99.93, 73.70, 0.9370),
        (14.84, 94.66, 65.15, 0.7536), (15.24, 94.94, 65.09, 0.7519), (1.80, 97.04, 66.83, 0.9069),
        (0.68, 96.59, 67.07, 0.9153), (0.00, 99.62, 70.74, 0.9870), (0.00, 99.86, 71.85, 0.9975),
    ],
}  # fmt: skip


def beside(task: str, init: str, accuracy: Table) -> Table | None:
    """Our accuracies and the paper's for each method that both have; None where there is none."""
    rows = PUBLISHED.get((task, init))
    if rows is None:
        return None
    ours = {column.label: column for column in accuracy.columns}
    columns = [
        column
        for label in COLUMNS
        for column in (Column(label, None, ours[label].digits, ours[label].percent),
                       Column(f"{label}, paper", None, ours[label].digits, ours[label].percent))
    ]  # fmt: skip
    cells: dict[str, dict[str, Figure]] = {}
    for name, published in zip((*ROWS, *OURS), rows, strict=True):
        if name not in accuracy.cells:
            continue
        cells[name] = {}
        for label, value in zip(COLUMNS, published, strict=True):
            cells[name][label] = accuracy.cells[name][label]
            cells[name][f"{label}, paper"] = Figure(value / 100 if ours[label].percent else value)
    return Table("paper", columns, cells) if cells else None
