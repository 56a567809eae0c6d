"""The README's examples run as they stand, one after the other."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run_in_order_and_print_what_they_say(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = []
    for code in blocks:
        exec(compile(code, "README.md", "exec"), names)
        printed.append(capsys.readouterr().out)

    forgotten, kept = map(float, printed[0].split())
    assert forgotten == 0.0
    assert kept > 0.99
    assert (tmp_path / "forget-3" / "edit.json").is_file()

    assert printed[1].startswith("separable")
    forgotten, kept = map(float, printed[1].split()[-2:])
    assert forgotten <= 0.01
    assert kept > 0.99

    assert "entanglement" in printed[2]
    assert names["edit"].removed == (3, 5)
