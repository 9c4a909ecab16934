import errno
import json

import pandas as pd
import pytest

from experiments import series
from experiments.errors import RunFailure


def test_a_line_that_a_kill_cut_short_is_left_out_and_the_rest_kept(tmp_path):
    (tmp_path / "ranks").mkdir()
    lines = [json.dumps({"rank": 0, "step": step, "loss": 1.0 / step}) for step in (1, 2)]
    (tmp_path / "ranks/rank-0.steps.jsonl").write_text("\n".join(lines) + '\n{"rank": 0, "st')
    assert list(series.collect(tmp_path)["steps"].step) == [1, 2]
    assert list(pd.read_parquet(tmp_path / "steps.parquet").step) == [1, 2]
    assert series.last_line(tmp_path / "ranks/rank-0.steps.jsonl")["step"] == 2


def test_a_full_disk_is_one_sentence_and_leaves_no_half_made_file(tmp_path, monkeypatch):
    def full(self, path, **_):
        path.write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(
        RunFailure, match=r"steps\.parquet: cannot be written \(No space left on device\).*ranks"
    ):
        series.write_parquet(pd.DataFrame({"step": [1]}), tmp_path / "steps.parquet")
    assert list(tmp_path.iterdir()) == []
