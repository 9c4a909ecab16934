"""A method from somebody else's module: the one in the documentation, run as written."""

import re
from pathlib import Path

import numpy as np
import pytest
from trainings import TINY, merged, read_run

from trainer.config import TrainerConfig
from trainer.config_errors import config_error_sentence

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-method.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (block,) = re.findall(
        r"```python\n(# my_methods\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "my_methods.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config(path="my_methods:SignVote", **options):
    method = {"name": "custom", "path": path, "options": options}
    return merged(TINY, {"method": method, "train": {"inner": "sgd", "lr": 0.003}})


def test_the_documented_method_trains_and_keeps_the_laws(folder, fleet):
    plain = config(block=256)
    fleet.run(4, "train_with_modules_of", folder=str(folder), config=plain, out=str(folder / "run"))
    run = read_run(plain, folder / "run")
    assert run.global_losses()[-1] < run.global_losses()[0] - 0.1
    for summary in run.summaries:
        assert summary["payload_bytes"]["wan"] == summary["planned_wan_bytes"] > 0
    for stage in (0, 1):
        assert run.summaries[stage]["outer_hash"] == run.summaries[stage + 2]["outer_hash"]
    fleet.run(4, "train_with_modules_of", folder=str(folder), config=plain, out=str(folder / "again"))
    assert np.array_equal(run.losses(), read_run(plain, folder / "again").losses())


@pytest.mark.parametrize(
    ("path", "options", "sentence"),
    [
        ("no_such_module:X", {}, "method.path: found 'no_such_module:X', which cannot be imported"),
        ("my_methods:Nothing", {}, "which cannot be imported"),
        ("my_methods:Options", {}, "allowed a subclass of trainer.methods.Method"),
        ("my_methods:SignVote", {"blok": 3}, "method.options.blok: found an unknown key, allowed block"),
        ("my_methods", {}, "method.path: found 'my_methods'"),
    ],
)
def test_a_wrong_method_is_refused_in_one_sentence(folder, path, options, sentence):
    with pytest.raises(ValueError) as refused:
        TrainerConfig.model_validate(config(path, **options))
    said = config_error_sentence(refused.value, "run.yaml", TrainerConfig)
    assert sentence in said and "\n" not in said
