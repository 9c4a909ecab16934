"""netem where the kernel has it, and the delay line beside it: the same assertions for both mechanisms."""

import math

import inside
import pytest

both = pytest.mark.parametrize("mechanism", inside.MECHANISMS)
everywhere = pytest.mark.parametrize("name", inside.RTTS_MS)


def part(facts, title):
    """What was measured in one part; its traceback is the failure where it did not get so far."""
    found = facts.get(title)
    if found is None:
        pytest.fail(f"{title}: not reached: {facts.get('error', 'inside.py does not measure it')}")
    if "error" in found:
        pytest.fail(f"{title}, in the virtual machine:\n{found['error']}", pytrace=False)
    return found


def test_the_doctor_finds_both_mechanisms_and_nothing_missing(facts):
    checks = part(facts, "doctor")["checks"]
    assert [f"{c['name']}: {c['detail']}" for c in checks if not c["ok"]] == []
    assert {"delay by netem", "delay by NFQUEUE"} <= {c["name"] for c in checks}


def test_netem_is_chosen_where_it_works_and_a_forced_choice_is_kept(facts):
    assert part(facts, "doctor")["chosen"] == {"auto": "netem", "netem": "netem", "nfqueue": "nfqueue"}


@both
@everywhere
def test_the_rtts_are_the_ones_asked_for(facts, name, mechanism):
    measured = part(facts, f"{name} {mechanism}")
    assert measured["delay"] == mechanism
    early, late = inside.EARLY_MS, inside.LATE_MS[mechanism]
    for pair, wanted in inside.RTTS_MS[name].items():
        rtts = measured["rtt_ms"][pair]
        assert -early <= rtts[-1] - wanted <= late, f"{pair}: {rtts} for {wanted} ms"


@both
@everywhere
def test_the_rate_is_the_one_asked_for(facts, name, mechanism):
    measured = part(facts, f"{name} {mechanism}")
    for pair, flows in measured["flows"].items():
        rates = [flow["rate_mbps"] for flow in flows]
        wanted = pytest.approx(inside.RATE_MBPS, rel=inside.RATE_TOLERANCE_SHARE)
        assert rates[-1] == wanted, f"{pair}: {rates} Mbit/s at layer 2"


@both
def test_packets_are_lost_as_often_as_asked(facts, mechanism):
    for pair, answered in part(facts, f"three {mechanism}")["answered"].items():
        both_ways = (1 - inside.LOSS[pair]) ** 2
        sigma = math.sqrt(inside.LOSS_PINGS * both_ways * (1 - both_ways))
        assert abs(answered - inside.LOSS_PINGS * both_ways) <= 4 * sigma, f"{pair}: {answered} came back"


@both
def test_the_lan_is_untouched(facts, mechanism):
    measured = part(facts, f"two {mechanism}")
    assert measured["lan_rtt_ms"] < 3
    assert measured["lan_rate_mbps"] > 10 * inside.RATE_MBPS


@both
def test_a_full_queue_holds_the_bytes_asked_for_and_not_so_many_packets_of_any_size(facts, mechanism):
    measured = part(facts, f"two {mechanism}")
    wanted = measured["queue_wanted_bytes"]
    queue_ms = wanted * 8 / (inside.RATE_MBPS * 1e3)
    for flow in (flows[-1] for flows in measured["flows"].values()):
        assert 0.1 * wanted < flow["queue_bytes"] <= wanted
        assert flow["rtt_ms"] <= 40 + 1.5 * queue_ms


@both
@everywhere
def test_the_kernel_has_exactly_the_delays_and_losses_of_the_plan(facts, name, mechanism):
    measured = part(facts, f"{name} {mechanism}")
    got = sorted(
        (
            q["dev"],
            round(q["options"]["delay"]["delay"] * 1e3, 3),
            round(q["options"].get("loss-random", {}).get("loss", 0), 6),
        )
        for q in measured["qdiscs"]
        if q["kind"] == "netem"
    )
    asked = sorted((d["to_interface"], d["delay_ms"], d["loss"]) for d in measured["asked"])
    queued = [line for line in measured["rules"].splitlines() if "NFQUEUE" in line]
    assert got == (asked if mechanism == "netem" else [])
    assert len(queued) == (0 if mechanism == "netem" else len(asked))
    assert measured["delay_alive"]
    assert all(q["options"].get("direct_packets_stat", 0) == 0 for q in measured["qdiscs"])


@both
@everywhere
def test_nothing_is_left_behind(facts, name, mechanism):
    assert part(facts, f"{name} {mechanism}")["left"] == {}


@both
def test_figures_change_while_the_network_is_up_and_come_back(facts, mechanism):
    measured = part(facts, f"events {mechanism}")
    early, late = inside.EARLY_MS, inside.LATE_MS[mechanism]
    for when, wanted in (("before", 40.0), ("changed", inside.CHANGED["rtt_ms"]), ("after", 40.0)):
        rtts = measured[f"{when}_ms"]
        assert -early <= rtts[-1] - wanted <= late, f"{when}: {rtts} for {wanted} ms"
    for when, wanted in (("changed", inside.CHANGED["rate_mbps"]), ("after", inside.RATE_MBPS)):
        rates = [flow["rate_mbps"] for flow in measured[f"{when}_flows"]]
        assert rates[-1] == pytest.approx(wanted, rel=inside.RATE_TOLERANCE_SHARE), f"{when}: {rates} Mbit/s"
    both_ways = (1 - inside.CHANGED["loss"]) ** 2
    sigma = math.sqrt(inside.LOSS_PINGS * both_ways * (1 - both_ways))
    assert abs(measured["answered"] - inside.LOSS_PINGS * both_ways) <= 4 * sigma
    assert measured["dark"] == 0
    assert measured["as_planned"]
