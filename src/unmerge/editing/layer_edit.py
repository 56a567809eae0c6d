"""LayerEdit: the low-rank change of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerEdit:
    """W ← W − α B Qᵀ, and a constant that keeps a mean response where there is a tensor to take it."""

    B: Tensor  # (out, k), or (groups, out/groups, k)
    Q: Tensor  # (in, k), or (groups, in, k), with orthonormal columns
    shift: Tensor | None = None  # added to the output, times alpha
    shift_to: str | None = None  # the bias, or the running mean of the BatchNorm behind
    transposed: bool = False  # the weight is stored as (in, out)
    beyond_lora: str | None = None  # why no LoRA adapter can hold it, where none can

    @property
    def rank(self) -> int:
        return self.B.shape[-1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it, by name."""
        parts = {"B": self.B, "Q": self.Q, "shift": self.shift}
        return {part: value for part, value in parts.items() if value is not None}

    def is_same(self, other: LayerEdit) -> bool:
        """Whether both change a layer alike, wherever their tensors lie."""
        if (self.shift_to, self.transposed) != (other.shift_to, other.transposed):
            return False
        own, others = self.tensors, other.tensors
        kinds = [{part: (value.shape, value.dtype) for part, value in each.items()} for each in (own, others)]
        return kinds[0] == kinds[1] and all(torch.equal(own[part], others[part].to(own[part].device)) for part in own)

    def fits(self, weight: Tensor) -> bool:
        """Whether the weight has the shape of this change."""
        out, inputs = self.B.shape[:-1].numel(), self.Q.shape[-2]
        return weight.numel() == out * inputs and weight.shape[0] == (inputs if self.transposed else out)
