"""Where members are placed, without a device."""

from __future__ import annotations

import dataclasses

import pytest

from onelaunch.device import A100, H200
from onelaunch.engines.resident.members.placement import Forced, choose_members_plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.stages import UnsupportedNetworkError
from tests.engines.resident.planning import LAYERS, settings_of


def chosen(widths, members=512, epochs=1, chip=H200, forced=None, **changes):
    settings = settings_of(widths, members=True, **changes)
    return choose_members_plan(settings, chip, members, epochs, **({"forced": forced} if forced else {}))


def test_small_networks_share_multiprocessors():
    found = chosen([16, 64, 64, 2], optimizer="adam")
    assert found.plan.blocks == 1
    assert found.places == 2 * H200.multiprocessors
    assert found.plan.shared.size <= (H200.shared_bytes + 1024) // 2 - 1024


def test_few_members_have_a_multiprocessor_each():
    assert chosen([16, 64, 64, 2], members=64, optimizer="adam").plan.settings.per_multiprocessor == 1


def test_a_network_whose_state_does_not_fit_streams_it():
    found = chosen([54, 128, 128, 7], batch=128, optimizer="adam")
    assert found.plan.blocks == 1
    assert set(found.plan.state_places) == {"device memory"}
    assert found.plan.warps == 16
    assert found.plan.exchange.size == 2 * found.plan.own_slots * found.plan.threads * 16  # two states


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_large_network_has_a_cluster(optimizer):
    found = chosen(LAYERS, optimizer=optimizer)
    assert found.plan.cluster
    assert not isinstance(found.plan, RowsPlan)
    assert found.places == {4: 30, 8: 15}[found.plan.blocks]


# Members, the epochs in which they take turns, and million steps per second of all of them, in bf16, measured on an H200
# (docs/lab-notebook/resident.md).
ADAM = {"optimizer": "adam"}
MEASURED = {
    "16-64-64-2": ([16, 64, 64, 2], ADAM, 512, 1, 53.4),
    "16-64-64-2, 64 members": ([16, 64, 64, 2], ADAM, 64, 1, 19.3),
    "54-128-128-7": ([54, 128, 128, 7], {"batch": 128, **ADAM}, 512, 1, 6.40),
    "54-128-128-7, 64 members": ([54, 128, 128, 7], {"batch": 128, **ADAM}, 64, 1, 3.17),
    "784-128-128-128-10, adam": (LAYERS, ADAM, 512, 1, 1.74),
    "784-128-128-128-10, adam, uint8": (LAYERS, {"uint8_rows": True, **ADAM}, 512, 1, 1.83),
    "784-128-128-128-10, adam, uint8, 64 members": (LAYERS, {"uint8_rows": True, **ADAM}, 64, 1, 1.58),
    "784-128-128-128-10, sgd": (LAYERS, {}, 512, 1, 3.39),
    "784-128-128-128-10, sgd, uint8": (LAYERS, {"uint8_rows": True}, 512, 1, 3.62),
    "784-128-128-128-10, sgd, uint8, 64 members": (LAYERS, {"uint8_rows": True}, 64, 1, 2.59),
    "784-128-128-128-10, adam, 64 members in turns": (LAYERS, ADAM, 64, 20, 1.69),
    "784-128-128-128-10, sgd, 64 members in turns": (LAYERS, {}, 64, 20, 3.38),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_prediction_is_within_a_quarter_of_the_measurement(name):
    widths, changes, members, epochs, measured = MEASURED[name]
    found = chosen(widths, members, epochs, **changes)
    assert found.steps_per_second(members, epochs) / 1e6 == pytest.approx(measured, rel=0.25)


# Placements of 16-64-64-2 with Adam by blocks per multiprocessor and warps: µs per step when all places are taken.
@pytest.mark.parametrize(
    ("per", "warps", "measured"), [(1, 8, 3.27), (2, 8, 4.80), (3, 8, 6.66), (4, 8, 11.84), (1, 16, 3.69)]
)
def test_the_prediction_of_other_placements_is_within_a_quarter(per, warps, measured):
    forced = Forced(1, True, per, warps)
    assert chosen([16, 64, 64, 2], forced=forced, **ADAM).microseconds == pytest.approx(measured, rel=0.25)


def test_more_members_than_places_take_several_rounds():
    found = chosen([16, 64, 64, 2], optimizer="adam")
    full = found.steps_per_second(found.places)
    assert found.steps_per_second(2 * found.places) == pytest.approx(full)
    assert found.steps_per_second(found.places + 1) < 0.51 * full
    assert found.steps_per_second(found.places + 1, epochs=16) > 0.85 * full  # they take turns


def test_the_description_names_places_and_prediction():
    text = chosen([16, 64, 64, 2], optimizer="adam").describe(512)
    assert "512 members, 264 at once: one block for each, 2 members per multiprocessor; predicted" in text
    assert "million steps per second" in text


def test_a_chip_without_clusters_takes_what_fits_in_a_block():
    assert chosen([16, 64, 64, 2], chip=A100).plan.blocks == 1
    with pytest.raises(UnsupportedNetworkError, match="does not fit on the chip"):
        chosen(LAYERS, chip=A100, optimizer="adam")


def test_too_many_outputs_are_refused():
    with pytest.raises(UnsupportedNetworkError, match="100 outputs"):
        chosen([16, 64, 100])


def test_a_placement_can_be_forced():
    found = chosen([16, 64, 64, 2], forced=Forced(blocks=2, by_rows=True))
    assert found.plan.blocks == 2
    assert isinstance(found.plan, RowsPlan)


def test_the_source_of_a_member_reads_dropout_from_its_parameters():
    settings = settings_of([5, 8, 8, 3], members=True, dropout=0.5)
    found = choose_members_plan(settings, dataclasses.replace(H200), 10)
    source = found.plan.source()
    assert "draw.keep[0]" in source
    assert "draw.keep[2]" in source
    assert "#define MEMBERS 1" in source
