"""Files of a checkpoint: they give back the same bits, or say that they cannot."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.checkpoint import Checkpoints, DamagedError, Place, saved_steps
from trainer.state import StateError, join_state, load_optimizer_state, optimizer_state, split_state
from trainer.tensor_file import DTYPES, TensorFileError, read_tensors, write_tensors


def state(step=1):
    return {
        "model": {"layers.0.weight": torch.arange(6.0).reshape(2, 3) * step, "gain": torch.ones(3)},
        "method": {"round": step, "ended": None, "recent": [1, 2], "lr": 0.1 + 0.2},
        "rng": torch.get_rng_state(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b and type(a) is type(b)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_tensors_come_back_bit_for_bit(tmp_path, shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": (torch.randn(shape, generator=generator) * 50).to(DTYPES[dtype])
        for i, shape in enumerate(shapes)
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    assert same(read_tensors(tmp_path / "x.safetensors"), tensors)


def test_the_file_is_what_the_safetensors_library_reads(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 5), "b": torch.tensor(7), "c": torch.ones(4, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "x.safetensors", tensors, {"step": "3"})
    assert same(library.load_file(tmp_path / "x.safetensors"), tensors)
    library.save_file(tensors, tmp_path / "y.safetensors")
    assert same(read_tensors(tmp_path / "y.safetensors"), tensors)


def test_a_file_that_is_cut_short_or_is_something_else_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    for content in (b"", b"short", whole[:40], whole[:-1], b"\xff" * 200):
        path.write_bytes(content)
        with pytest.raises(TensorFileError, match=r"x\.safetensors"):
            read_tensors(path)


def test_a_state_is_a_tree_of_tensors_and_plain_values_and_nothing_else():
    tensors, tree = split_state(state())
    assert same(join_state(tensors, json.loads(json.dumps(tree))), state())
    for wrong in (
        {"a": object()},
        {"a": float("nan")},
        {"a/b": 1},
        {1: 1},
        {"a": [{"b": 1}]},
        {"a": {"$tensor": "b"}},
    ):
        with pytest.raises(StateError):
            split_state(wrong)
    with pytest.raises(StateError, match="missing"):
        join_state({}, tree)


def test_an_optimiser_continues_bit_for_bit():
    def train(parameters, optimizer, steps):
        for step in steps:
            for p in parameters.values():
                p.grad = torch.sin(p.detach() * step)
            optimizer.step()

    def fresh():
        parameters = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.zeros(2))}
        return parameters, torch.optim.AdamW(parameters.values(), lr=0.1)

    never, optimizer = fresh()
    train(never, optimizer, range(3))
    kept = split_state({"p": dict(never), "o": optimizer_state(optimizer, never)})
    tensors = {name: tensor.clone() for name, tensor in kept[0].items()}
    train(never, optimizer, range(3, 6))
    resumed, optimizer = fresh()
    loaded = join_state(tensors, kept[1])
    for name, p in resumed.items():
        p.data.copy_(loaded["p"][name])
    load_optimizer_state(optimizer, resumed, loaded["o"])
    train(resumed, optimizer, range(3, 6))
    assert same(dict(never), dict(resumed))


def test_the_last_checkpoints_are_kept_and_come_back(tmp_path):
    barriers = []
    checkpoints = Checkpoints(tmp_path, 1, keep=2, barrier=lambda: barriers.append(1))
    for step in (5, 10, 15):
        checkpoints.settle()
        changing = state(step)
        checkpoints.save(step, changing)
        changing["model"]["gain"].zero_()  # training goes on
        assert len(barriers) == step // 5 - 1, "what is older goes only once the newest is whole everywhere"
    checkpoints.close()
    assert saved_steps(tmp_path, 1) == [15, 10] and not saved_steps(tmp_path, 0)
    assert same(Place(tmp_path, 10, 1).read(), state(10))


def damage(folder, what):
    tensors, values, manifest = (
        folder / name for name in ("state.safetensors", "state.json", "manifest.json")
    )
    if what == "missing":
        values.unlink()
    elif what == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    else:
        file = {"tensors": tensors, "values": values, "manifest": manifest}[what]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("what", ["missing", "cut", "tensors", "values", "manifest"])
def test_any_damage_is_found_and_named(tmp_path, what):
    place = Place(tmp_path, 3, 0)
    place.write(*split_state(state()))
    place.verify()
    damage(place.folder, what)
    with pytest.raises(DamagedError, match=r"step-00000003/rank-0"):
        place.read()


def test_a_full_disk_leaves_nothing_half_made(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    place = Place(tmp_path, 3, 0)
    monkeypatch.setattr("trainer.checkpoint.write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        place.write(*split_state(state()))
    assert not place.folder.exists() and not list(place.folder.parent.iterdir())
