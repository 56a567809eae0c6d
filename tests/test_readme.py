"""The README's first example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_first_example_prints_what_its_comment_says(tmp_path, monkeypatch, capsys):
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    forgotten, kept = map(float, capsys.readouterr().out.split())
    assert forgotten == 0.0
    assert kept > 0.99
    assert (tmp_path / "forget-3" / "edit.json").is_file()
