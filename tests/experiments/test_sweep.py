"""Laws of expansion: how many runs, in which order, under which names."""

import copy
import itertools

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.config import resolve_run
from experiments.errors import RequestError
from experiments.overrides import apply_override, deep_merge, expand_dotted, flatten, get_dotted
from experiments.sweep import SweepConfig, expand, load_sweep, run_id

KEYS = {
    "allreduce": {"name", "wire"},
    "diloco": {"name", "local_steps", "compressor", "compressor.name"},
    "dilocox": {"name", "local_steps", "compressor", "compressor.name", "compressor.rank"},
}
DEFAULTS = {
    "allreduce": {"wire": "fp32"},
    "diloco": {"local_steps": 20},
    "dilocox": {"local_steps": 20, "compressor": {"name": "lowrank", "rank": 32}},
}


def keys_of_method(method):
    return KEYS.get(method.get("name"), set().union(*KEYS.values()))


def validate(config):
    method = config.get("method", {})
    if method.get("name") not in KEYS:
        raise RequestError(f"method.name: found {method.get('name')!r}")
    return {"seed": 0, "lr": 1.0, **config, "method": deep_merge(DEFAULTS[method["name"]], method)}


def planned(**keys):
    content = {"name": "s", "base": {"method": {"name": "dilocox"}}, **keys}
    return expand(SweepConfig.model_validate(content), validate, keys_of_method)


def ids(runs):
    return [run.run_id for run in runs]


lists = st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True)
seed_lists = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)


@given(steps=lists, ranks=lists, seeds=seed_lists)
def test_a_grid_is_every_combination_once_in_order(steps, ranks, seeds):
    runs = planned(grid={"method.local_steps": steps, "method.compressor.rank": ranks}, seeds=seeds)
    found = [
        (r.config["method"]["local_steps"], r.config["method"]["compressor"]["rank"], r.config["seed"])
        for r in runs
    ]
    assert found == list(itertools.product(steps, ranks, seeds))
    assert len(set(ids(runs))) == len(runs)


@given(steps=lists, seeds=seed_lists)
def test_allreduce_runs_once_per_seed_however_many_local_steps(steps, seeds):
    grid = {"method.name": ["allreduce", "dilocox"], "method.local_steps": steps}
    runs = planned(grid=grid, seeds=seeds)
    assert len(runs) == len(seeds) * (1 + len(steps))
    plain = [run for run in runs if run.config["method"]["name"] == "allreduce"]
    assert [run.config["seed"] for run in plain] == seeds
    assert all(
        "local_steps" not in run.config["method"] and "method.local_steps" not in run.varied for run in plain
    )


@given(steps=lists, more=lists, seeds=seed_lists)
def test_editing_a_sweep_renames_no_run_that_stays(steps, more, seeds):
    before = planned(grid={"method.local_steps": steps}, seeds=seeds)
    longer = list(dict.fromkeys([*more, *steps]))
    after = planned(grid={"lr": [1.0, 2.0], "method.local_steps": longer}, seeds=seeds, name="renamed")
    assert set(ids(before)) <= set(ids(after))
    assert len(set(ids(after))) == len(after) == 2 * len(longer) * len(seeds)


@given(values=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_equal_runs_merge(values):
    runs = planned(grid={"method.local_steps": values})
    assert [r.config["method"]["local_steps"] for r in runs] == list(dict.fromkeys(values))


@given(rows=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5, unique=True))
def test_zip_pairs_row_by_row(rows):
    steps, ranks = (list(column) for column in zip(*rows, strict=True))
    runs = planned(**{"zip": {"method.local_steps": steps, "method.compressor.rank": ranks}})
    found = [(r.config["method"]["local_steps"], r.config["method"]["compressor"]["rank"]) for r in runs]
    assert found == rows


def test_list_elements_are_variants_crossed_with_the_grid():
    variants = [{"method.name": "allreduce"}, {"method": {"name": "diloco", "local_steps": 4}}]
    runs = planned(**{"list": variants, "grid": {"lr": [1.0, 3.0]}})
    assert [(r.config["method"]["name"], r.config["lr"]) for r in runs] == [
        ("allreduce", 1.0),
        ("allreduce", 3.0),
        ("diloco", 1.0),
        ("diloco", 3.0),
    ]
    assert "wire" in runs[0].config["method"]


def test_varied_names_only_what_differs():
    runs = planned(grid={"method.local_steps": [4, 8], "lr": [2.0]}, seeds=[0])
    assert [run.varied for run in runs] == [{"method.local_steps": 4}, {"method.local_steps": 8}]


def test_a_key_that_no_method_has_is_an_error_that_names_the_nearest():
    with pytest.raises(RequestError, match=r"method\.locl_steps.*did you mean 'local_steps'"):
        planned(grid={"method.name": ["allreduce", "dilocox"], "method.locl_steps": [1, 2]})


def test_a_baseline_must_match_a_run():
    assert planned(grid={"method.name": ["allreduce", "dilocox"]}, baseline={"method.name": "allreduce"})
    with pytest.raises(RequestError, match="matches none of its 1 runs"):
        planned(baseline={"method.name": "allreduce"})


def test_a_run_that_is_refused_refuses_the_sweep():
    with pytest.raises(RequestError, match="nonesuch"):
        planned(grid={"method.name": ["allreduce", "nonesuch"]})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zip": {"a": [1, 2], "b": [1]}}, "equally long"),
        ({"grid": {"a": [1]}, "zip": {"a": [1]}}, "set by grid"),
        ({"grid": {"method": [{}]}, "list": [{"method.name": "x"}]}, "set by grid"),
        ({"grid": {"seed": [1]}, "seeds": [0]}, "set by grid"),
        ({"grid": {"a": []}}, "grid.a"),
        ({"seeds": [-1]}, "seeds.0"),
        ({"gird": {}}, "did you mean 'grid'"),
        ({"folder": "x"}, "unknown key"),
    ],
)
def test_bad_sweeps_are_refused_in_one_sentence(tmp_path, keys, words):
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({"name": "s", "base": {}, **keys}))
    with pytest.raises(RequestError, match=words) as caught:
        load_sweep(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_base_by_path_overrides_and_topology_beside_the_sweep(tmp_path):
    folder = tmp_path / "sweeps"
    folder.mkdir()
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "n.yaml").write_text("name: n\n")
    (folder / "base.yaml").write_text("topology: nets/n.yaml\nmethod.name: dilocox\n")
    (folder / "s.yaml").write_text("{name: s, base: base.yaml, grid: {method.local_steps: [2, 4]}}")
    sweep = load_sweep(folder / "s.yaml", ["method.compressor.rank=7"])
    runs = expand(sweep, validate, keys_of_method)
    assert {run.config["topology"] for run in runs} == {str(tmp_path / "nets" / "n.yaml")}
    assert {run.config["method"]["compressor"]["rank"] for run in runs} == {7}


def test_plain_can_be_read_again(tmp_path):
    content = {
        "name": "s",
        "base": {"method": {"name": "dilocox"}},
        "zip": {"method.local_steps": [1, 2]},
        "seeds": [3],
    }
    sweep = SweepConfig.model_validate(content)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep.plain()))
    again = load_sweep(tmp_path / "s.yaml")
    assert ids(expand(again, validate, keys_of_method)) == ids(expand(sweep, validate, keys_of_method))


def test_the_name_is_a_label_and_no_part_of_the_id():
    config = {"method": {"name": "dilocox", "local_steps": 20, "compressor": {"name": "int4"}}, "seed": 2}
    assert run_id({**config, "name": "a"}) == run_id({**config, "name": "b"})
    assert run_id(config).startswith("dilocox-h20-int4-s2-")
    assert run_id(config) != run_id({**config, "seed": 3})


def test_the_quickstart_has_three_runs_with_the_real_classes():
    sweep = load_sweep("experiments/sweeps/quickstart.yaml")
    runs = expand(sweep, lambda data: resolve_run(data, "quickstart").plain())
    assert [run.config["method"]["name"] for run in runs] == ["allreduce", "diloco", "dilocox"]
    assert "collective" in runs[0].config["method"] and "collective" not in runs[1].config["method"]


def test_a_grid_over_compressors_drops_the_keys_that_one_lacks():
    base = {
        "topology": "loopback",
        "method": {"name": "dilocox", "compressor": {"name": "lowrank-int4", "rank": 8}},
    }
    sweep = SweepConfig(name="s", base=base, grid={"method.compressor.name": ["int4", "lowrank-int4"]})
    runs = expand(sweep, lambda data: resolve_run(data, "s").plain())
    assert ["rank" in run.config["method"]["compressor"] for run in runs] == [False, True]


leaves = st.integers(0, 9) | st.none()
inner = st.dictionaries(st.sampled_from("abc"), leaves, min_size=1, max_size=2)
mappings = st.dictionaries(st.sampled_from("abc"), leaves | inner, max_size=3)


@given(mappings)
def test_flatten_and_expand_are_inverse(data):
    assert expand_dotted(flatten(data)) == data


@given(mappings, mappings)
def test_what_is_merged_on_top_wins_and_nothing_is_changed_in_place(base, over):
    before = copy.deepcopy((base, over))
    merged = deep_merge(base, over)
    assert (base, over) == before
    assert all(get_dotted(merged, key) == value for key, value in flatten(over).items())
    assert deep_merge(merged, over) == merged


def test_override_sets_a_nested_value_as_yaml():
    data = {"a": 1}
    apply_override(data, "b.c=[1, 2]")
    apply_override(data, "b.d=null")
    assert data == {"a": 1, "b": {"c": [1, 2], "d": None}}


@pytest.mark.parametrize("bad", ["novalue", "a..b=1", "=1", "a.b=1", "c=[1"])
def test_bad_overrides_are_one_sentence(bad):
    with pytest.raises(RequestError, match="--set"):
        apply_override({"a": 1}, bad)


def test_a_section_whose_name_another_method_uses_for_a_plain_value_drops_out_whole():
    """`overlap` is a section of local-update methods and a switch of AllReduce's."""
    method = {"local_steps": 2, "overlap": {"delay_rounds": 0}}
    sweep = SweepConfig.model_validate(
        {
            "name": "s",
            "base": {"method": method},
            "list": [{"method.name": "allreduce"}, {"method.name": "diloco"}],
        }
    )
    methods = [run.config["method"] for run in expand(sweep, lambda data: data)]
    assert methods == [{"name": "allreduce"}, {**method, "name": "diloco"}]
