"""A text read through Hugging Face `datasets`, offline: every line once, over 2 ranks with 2 workers each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

NUM_FILES = 7  # no multiple of 2 ranks x 2 workers


def test_a_model_learns_from_every_line_of_a_text(tmp_path: Path) -> None:
    texts = [line for text in topics.topics.values() for line in text.splitlines() if line.strip()]
    lines = [f"{number}\t{line}" for number, line in enumerate(texts)]
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(NUM_FILES):
        (folder / f"{index}.txt").write_text("\n".join(lines[index::NUM_FILES]) + "\n", encoding="utf-8")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "2"]
    script = Path(__file__).with_name("text_stream.py")
    done = subprocess.run(
        [*command, str(script), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print(found)
    assert (found["lines"], found["times_read"]) == (len(lines), [1])
    assert found["last_loss"] < 0.75 * found["first_loss"]
