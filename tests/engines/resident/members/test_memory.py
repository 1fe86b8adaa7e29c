"""The memory of many members, on the CPU: weights in and out, the table of parameters, losses that stop being finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onelaunch.device import chip_of
from onelaunch.engines.members import MemberTask
from onelaunch.engines.resident.members.memory import MembersMemory, SharedRows
from onelaunch.engines.resident.members.placement import choose_members_plan
from onelaunch.engines.resident.members.slices import Slice
from onelaunch.engines.resident.members.train import settings_of
from onelaunch.engines.resident.session import PARAMS, RECORD
from onelaunch.rng import keep_threshold
from onelaunch.train.inputs import make_run
from tests.engines.graph.harness import network

WIDTHS, MEMBERS, STEPS = [5, 16, 3], 4, 6
CPU = torch.device("cpu")


@pytest.fixture
def memory() -> MembersMemory:
    x, y = torch.randn(20, WIDTHS[0]), torch.arange(20) % WIDTHS[-1]
    tasks = []
    for number in range(MEMBERS):
        options = {
            "steps": 2 * STEPS, "batch_size": 8, "lr": 0.1 * (number + 1), "seed": number + 2**62, "optimizer": "adam",
            "precision": "bf16",
        }  # fmt: skip
        run = make_run(network(WIDTHS, "relu", 0.1 * (number + 1)).to(CPU), x, y, (x[:7], y[:7]), options)
        tasks.append(MemberTask(number, run, number, number + STEPS))
    runs = [task.run for task in tasks]
    plan = choose_members_plan(settings_of(runs), chip_of(CPU), MEMBERS).plan
    return MembersMemory(tasks, plan, SharedRows(plan), places=2)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_weights_go_in_and_out(memory: MembersMemory) -> None:
    models = [task.run.model for task in memory.tasks]
    before = [flat(model).clone() for model in models]
    assert torch.equal(memory.weights, torch.stack(before))
    new = torch.randn_like(memory.weights)
    memory.weights.copy_(new)
    memory.write_back([0, 2])
    for number, model in enumerate(models):
        assert torch.equal(flat(model), new[number] if number in (0, 2) else before[number])


def test_the_table_has_each_members_own_parameters(memory: MembersMemory) -> None:
    whole = [Slice(number, task.first_step, task.last_step, 0) for number, task in enumerate(memory.tasks)]
    table = memory.table(1000, 64, whole).numpy().view(PARAMS)
    assert table["lr"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert table["seed"].tolist() == [number + 2**62 for number in range(MEMBERS)]
    assert table["control"].tolist() == [1000, 1064, 1128, 1192]
    assert table["first_step"].tolist() == [0, 1, 2, 3]
    assert table["last_step"].tolist() == [6, 7, 8, 9]
    for name, tensor in (("weights", memory.weights), ("state0", memory.states[0]), ("state1", memory.states[1])):
        assert table[name].tolist() == [row.data_ptr() for row in tensor]
    assert len(set(table["x"].tolist())) == len(set(table["y"].tolist())) == 1
    assert table["validation_rows"].tolist() == [7] * MEMBERS
    assert np.all(table["validation_x"] != 0)
    assert np.all(table["row_numbers"] == 0)
    assert table["keep"][:, 0].tolist() == [keep_threshold(0.1 * (number + 1)) for number in range(MEMBERS)]
    assert np.all(np.diff(table["losses"].astype(np.int64)) == 4 * STEPS)
    assert np.all(table["fault_step"] == 2**63)


def test_a_slice_has_its_members_memory_from_its_first_step_on(memory: MembersMemory) -> None:
    table = memory.table(0, 64, [Slice(1, 1, 3, 0), Slice(0, 0, 6, 0), Slice(1, 3, 7, 1)]).numpy().view(PARAMS)
    assert table["first_step"].tolist() == [1, 0, 3]
    assert table["last_step"].tolist() == [3, 6, 7]
    assert table["weights"][0] == table["weights"][2] != table["weights"][1]
    assert int(table["losses"][2]) - int(table["losses"][0]) == 4 * 2
    assert int(table["records"][2]) - int(table["records"][0]) == RECORD.itemsize
    assert table["control"].tolist() == [0, 64, 128]


def test_the_first_loss_that_is_not_finite_is_found(memory: MembersMemory) -> None:
    losses, broken = memory.losses()
    assert [len(one) for one in losses] == [STEPS] * MEMBERS
    assert broken == {}
    for position in (STEPS + 3, STEPS + 5, 3 * STEPS):
        memory._losses[position] = float("nan")
    memory._losses[3 * STEPS + 1] = float("inf")
    assert memory.losses()[1] == {1: 3, 3: 0}
