"""The walk-through of docs/extending.md runs as it is printed, outside the package."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_family_of_the_page_trains_in_two_layouts_and_equals_transformers(
    run_python, corpus_cache, tmp_path
):
    files = re.findall(r"Save this as `(\w+\.py)`.*?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert [name for name, _ in files] == ["olmo.py", "olmo_family.py", "train_olmo.py"]
    assert sum(len(text.splitlines()) for _, text in files) < 150
    for name, text in files:
        (tmp_path / name).write_text(text)
    (tmp_path / "data").symlink_to(corpus_cache)
    done = run_python("train_olmo.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with tp 2") == 4
