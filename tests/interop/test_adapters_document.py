"""The examples of docs/adapters.md run as they stand, one after the other."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from requests_at_hand import TEXTS, saved_decoder
from torch.testing import assert_close

from decoders import decoder, padded, sentences

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    base = saved_decoder(tmp_path / "llama", dtype=torch.float32)
    peft_model = get_peft_model(
        copy.deepcopy(base), LoraConfig(target_modules=["down_proj", "q_proj"], init_lora_weights=False)
    )
    forget = [padded(sentences([16] * 20, seed=1, high=8))]
    retain = [padded(sentences([16] * 20, seed=2, low=8))]
    names = {"__name__": "document", "forget": forget, "retain": retain, "inputs": TEXTS, "peft_model": peft_model}
    for code in blocks:
        exec(compile(code, str(DOCUMENT), "exec"), names)

    assert (names["forgotten"] - names["remembered"]).abs().max() > 1e-3
    assert_close(names["plain"](**TEXTS).logits, names["forgotten"])
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(1, abs=1e-3)
    assert list(names["edit"].layers) == [f"model.layers.{block}.mlp.down_proj" for block in range(3)]
    assert (tmp_path / "llama-forgotten" / "README.md").is_file()
    assert type(names["model"]) is type(decoder("llama"))
