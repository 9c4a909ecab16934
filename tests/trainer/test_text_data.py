"""The same seed gives the same tokens, whoever asks; documents are held out whole."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig
from trainer.data import DataError, Sampler, load_corpus

CORPUS = load_corpus(DataConfig(), seed=0)
SAMPLER = Sampler(CORPUS, seq_len=32, seed=7)


@settings(max_examples=30, deadline=None)
@given(step=st.integers(1, 10_000), replicas=st.sampled_from([1, 2, 4]))
def test_the_global_batch_does_not_depend_on_replicas_or_on_earlier_draws(step, replicas):
    each = 8 // replicas
    fresh = Sampler(CORPUS, seq_len=32, seed=7)
    slices = [fresh.batch(step, replica * each, each) for replica in reversed(range(replicas))]
    assert np.array_equal(np.concatenate(slices[::-1]), SAMPLER.batch(step, 0, 8))


def test_batches_differ_by_seed_step_and_sequence():
    batch = SAMPLER.batch(1, 0, 64)
    assert batch.shape == (64, 33) and batch.dtype == np.uint8
    assert len({row.tobytes() for row in batch}) > 60
    assert not np.array_equal(batch, SAMPLER.batch(2, 0, 64))
    assert not np.array_equal(batch, Sampler(CORPUS, 32, seed=8).batch(1, 0, 64))


def test_validation_windows_are_fixed_and_from_the_holdout_only():
    windows = SAMPLER.validation(32 * 20, multiple_of=8)
    assert windows.shape == (16, 33)
    assert np.array_equal(windows, Sampler(CORPUS, 32, seed=99).validation(32 * 20, multiple_of=8))
    assert all(row.tobytes() in CORPUS.holdout.tobytes() for row in windows)
    assert len({row.tobytes() for row in windows}) == 16
    assert len(SAMPLER.validation(10**9)) == (len(CORPUS.holdout) - 1) // 32


def test_tuning_windows_share_no_byte_with_validation_windows():
    """Positions, not contents: the holdout is replaced by a stream in which every byte tells its place."""
    place = np.arange(256, dtype=np.uint8).repeat(40)
    numbered = Sampler(replace(CORPUS, holdout=place), seq_len=32, seed=0)
    validation, tuning = numbered.validation(32 * 64, multiple_of=8), numbered.tuning(32 * 64, multiple_of=8)
    assert tuning.shape == (56, 33) and validation.shape == (64, 33)
    own, other = numbered._validation_starts(32 * 64, 8), place.size
    taken = np.zeros(other, dtype=int)
    for start in own:
        taken[start : start + 33] += 1
    middle = [(a + b) // 2 for a, b in itertools.pairwise(own)]
    assert all(not taken[start : start + 33].any() for start in middle)
    assert np.array_equal(tuning, np.stack([place[s : s + 33] for s in middle[:56]]))


def test_a_holdout_too_short_for_tuning_is_refused_with_the_length_it_needs():
    short = Sampler(replace(CORPUS, holdout=CORPUS.holdout[:2000]), seq_len=32, seed=0)
    with pytest.raises(
        DataError, match=r"eval.part: found 'tuning' with 2000 held-out tokens, allowed is at"
    ):
        short.tuning(32 * 56, multiple_of=8)


def test_documents_are_held_out_whole_and_independently_of_each_other(tmp_path):
    for index in range(40):
        (tmp_path / f"{index:02}.txt").write_text(f"<{index}>" * 30)
    config = DataConfig(source=str(tmp_path), seq_len=16, holdout=0.3)
    before = load_corpus(config, seed=0)
    (tmp_path / "07.txt").unlink()
    after = load_corpus(config, seed=1)
    train, holdout = before.train.tobytes(), before.holdout.tobytes()
    for index in range(40):
        marker = f"<{index}>".encode()
        assert (marker in train) != (marker in holdout)
        if index != 7:
            assert (marker in holdout) == (marker in after.holdout.tobytes())
    assert before.sha256 != after.sha256


def test_one_file_is_cut_into_documents(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {n}\n" for n in range(20_000)))
    corpus = load_corpus(DataConfig(source=str(file), seq_len=16), seed=0)
    assert 0 < len(corpus.holdout) < len(corpus.train)
    whole = len(corpus.train) + len(corpus.holdout)
    assert whole - file.stat().st_size == -(-file.stat().st_size // 8192), "one separator a document"


def test_markov_text_has_the_entropy_it_says():
    corpus = load_corpus(DataConfig(source="markov"), seed=3)
    again = load_corpus(DataConfig(source="markov"), seed=3)
    assert corpus.sha256 == again.sha256 != load_corpus(DataConfig(source="markov"), seed=4).sha256
    pairs = np.zeros((256, 256))
    np.add.at(pairs, (corpus.train[:-1], corpus.train[1:]), 1)
    joint = pairs / pairs.sum()
    present = joint > 0
    conditional = joint / np.maximum(joint.sum(axis=1, keepdims=True), 1e-12)
    entropy = -(joint[present] * np.log(conditional[present])).sum()
    assert entropy == pytest.approx(corpus.entropy_floor, rel=0.01)
    assert 0.5 < corpus.entropy_floor < np.log(8)


def test_unusable_sources_are_named_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_corpus(DataConfig(source=str(tmp_path / "nowhere")), seed=0)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match="tokens for training"):
        load_corpus(DataConfig(source=str(tmp_path)), seed=0)
    with pytest.raises(DataError, match="tokens for"):
        (tmp_path / "empty").mkdir()
        load_corpus(DataConfig(source=str(tmp_path / "empty")), seed=0)


def test_python_docs_say_which_package_brings_them(monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.data.PYTHON_DOCS", (str(tmp_path), "python3*/html/_sources/**/*.rst.txt"))
    with pytest.raises(DataError, match="python3-doc"):
        load_corpus(DataConfig(source="python-docs"), seed=0)
    folder = tmp_path / "python3.11" / "html" / "_sources" / "library"
    folder.mkdir(parents=True)
    for index in range(30):
        (folder / f"{index}.rst.txt").write_text(f"document {index}\n" * 20)
    assert load_corpus(DataConfig(source="python-docs"), seed=0).source == "python-docs"
