"""Experts that are plain layers, are called without a token, or saw too little to learn from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unmerge
from unmerge.errors import LayerError, StatisticsError, UnmergeWarning
from unmerge.recipe import Recipe


class Mixture(nn.Module):
    """Sends each state to the expert of its largest entry; `always` calls an expert also without any."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.always = always

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden[..., :3].argmax(-1)
        out = torch.zeros_like(hidden)
        for place, expert in enumerate(self.experts):
            mine = chosen == place
            if self.always or mine.any():
                out[mine] = expert(hidden[mine])
        return out


class Model(nn.Module):
    """Tokens go to the expert of their number modulo three."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.mixture = Mixture(always)
        with torch.no_grad():
            self.embedding.weight[:, :3] += 20 * torch.eye(3).repeat(4, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.mixture(self.embedding(input_ids))


def batch(tokens: tuple[int, ...], seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(tokens)[torch.randint(len(tokens), (6, 20), generator=generator)]
    return [{"input_ids": chosen, "attention_mask": torch.ones_like(chosen), "group": torch.full((6,), seed)}]


FORGET, RETAIN = batch((0, 3, 1), 0), batch((6, 9, 4, 7), 1)  # the third expert gets none
RECIPE = Recipe(layers="re:experts", rank=2, retain_rank=2, head="edit")


@pytest.mark.parametrize("always", [False, True])
def test_an_expert_without_a_token_is_left_alone(always: bool) -> None:
    torch.manual_seed(0)
    with pytest.warns(UnmergeWarning):
        edit = unmerge.fit(Model(always), FORGET, RETAIN, init="zero", recipe=RECIPE)
    assert set(edit.layers) == {"mixture.experts.0", "mixture.experts.1"}
    assert "mixture.experts.2" in edit.provenance["notes"]["left_out"]


def test_too_few_tokens_for_every_expert_is_said() -> None:
    with (
        pytest.warns(UnmergeWarning),
        pytest.raises(LayerError, match=r"no selected layer is left to edit.*fewer than 400.*lower rank"),
    ):
        unmerge.fit(Model(), FORGET, RETAIN, init="zero", recipe=RECIPE.but(rank=100))


def test_statistics_of_other_weights_are_refused_also_where_experts_are_left_alone() -> None:
    model = Model()
    with pytest.warns(UnmergeWarning):
        forget, retain = (unmerge.collect(model, data, "re:experts") for data in (FORGET, RETAIN))
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    with pytest.warns(UnmergeWarning), pytest.raises(StatisticsError, match=r"embedding\.weight"):
        unmerge.fit(model, forget, retain, init="zero", recipe=RECIPE.but(rank=12))
