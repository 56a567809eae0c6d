"""A small mixture whose words say which expert they go to."""

import torch
from torch import nn

PER_EXPERT = 10  # words of expert 0, then those of expert 1, and so on
EXPERTS = 3
WIDTH = 8


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, hidden):
        return self.down(torch.relu(self.up(hidden)))


class Routing(nn.Module):
    """Sends each token to the expert that its largest first feature names, times `scale`.

    calls_all: an expert without a token is called with none.
    """

    def __init__(self, scale, calls_all):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.scale, self.calls_all = scale, calls_all

    def forward(self, hidden):
        rows = hidden.reshape(-1, WIDTH)
        chosen = rows[:, :EXPERTS].argmax(-1)
        result = torch.zeros_like(rows)
        for place, expert in enumerate(self.experts):
            own = (chosen == place).nonzero()[:, 0]
            if len(own) or self.calls_all:
                result = result.index_copy(0, own, expert(rows[own] * self.scale))
        return hidden + result.reshape(hidden.shape)


class WordMixture(nn.Module):
    def __init__(self, scale=1.0, calls_all=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(EXPERTS * PER_EXPERT, WIDTH)
        self.routing = Routing(scale, calls_all)
        self.head = nn.Linear(WIDTH, EXPERTS * PER_EXPERT)
        with torch.no_grad():
            self.words.weight[:, :EXPERTS] /= 10
            for place in range(EXPERTS):
                self.words.weight[place * PER_EXPERT : (place + 1) * PER_EXPERT, place] += 3

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.routing(self.words(input_ids)))


def texts(experts, batches, seed=0, size=8, length=12, padded=True):
    """Batches of words of some experts, the last two positions padding."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(batches):
        expert = torch.tensor(experts)[torch.randint(len(experts), (size, length), generator=generator)]
        words = expert * PER_EXPERT + torch.randint(PER_EXPERT, (size, length), generator=generator)
        batch = {"input_ids": words}
        if padded:
            batch["attention_mask"] = (torch.arange(length) < length - 2).long().expand(size, -1)
        found.append(batch)
    return found
