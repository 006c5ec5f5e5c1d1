"""Which processes train together: from flags, from torchrun, inside of a Slurm job."""

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.batch import plan_batch
from moa_fairseq.recipes.command import Options, run_recipe
from moa_fairseq.recipes.hardware import Hardware, World, find_world
from moa_fairseq.recipes.loading import load_recipe

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
TORCHRUN.update(MASTER_ADDR="a", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x")


def test_machines_by_flags():
    world = find_world(8, nodes=4, node_rank=2, master="node0", environment={})
    assert world == World(32, 16, 8, "tcp://node0:29500", spawn=True)
    assert Hardware(8, world=world).shared and not Hardware(8, world=world).leads
    assert find_world(0, 2, 1, "tcp://node0:7", {}) == World(2, 1, 1, "tcp://node0:7", spawn=False)
    assert find_world(8, environment={}) is None
    assert find_world(1, nodes=1, node_rank=0, master="x", environment={}) is None


def test_torchrun_is_one_process_of_many():
    world = find_world(8, environment=TORCHRUN)
    assert world == World(16, 9, 1, "env://", spawn=False, device=1)
    assert find_world(0, environment=TORCHRUN).device is None
    assert find_world(1, environment={**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None


def test_a_machine_inside_of_a_slurm_job_keeps_to_itself():
    world = find_world(8, environment={"SLURM_JOB_ID": "123456"})
    assert (
        world == World(8, 0, 8, "tcp://127.0.0.1:33456", spawn=True) and not Hardware(8, world=world).shared
    )
    assert find_world(1, environment={"SLURM_JOB_ID": "123456"}) is None


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((8, 2, 2, "a"), {}, "--node-rank 2"),
        ((8, 2, 0, None), {}, "needs --master"),
        ((8, 2, 0, "a b"), {}, "write HOST or HOST:PORT"),
        ((8, 2, 0, "a:99999"), {}, "write HOST or HOST:PORT"),
        ((8, 2, 0, "a"), TORCHRUN, "leave them out"),
        ((4, None, None, None), TORCHRUN, "--nproc-per-node 4"),
    ],
)
def test_contradictions(arguments, environment, message):
    with pytest.raises(UserError, match=message):
        find_world(*arguments, environment=environment)


def test_the_papers_batch_on_any_world(small, write_config, tmp_path, shown):
    small["train"].update(effective_batch_tokens=262144, max_tokens=8192)
    recipe = load_recipe(write_config(small))
    for nodes, gpus, steps in ((1, 1, 32), (1, 8, 4), (2, 8, 2), (4, 8, 1), (8, 8, 1)):
        world = find_world(gpus, nodes, nodes - 1, "head", {})
        hardware = Hardware(gpus, "V100", (7, 0), tuple("01234567")[:gpus], world)
        batch = plan_batch(recipe.train, hardware.devices)
        assert (batch.effective, batch.update_freq) == (262144, steps)
        (line,) = shown(recipe, hardware, Options(stage="train"))
        assert line[line.index("--distributed-world-size") + 1] == str(nodes * gpus)
        if world:
            assert line[line.index("--distributed-rank") + 1] == str((nodes - 1) * gpus)
        assert "--ddp-backend" not in line and "--cpu" not in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "all"}, "share the train stage only"),
        ({"stage": "train", "restart": True}, "--stage prepare"),
        ({"stage": "train"}, "No prepared data is known"),
    ],
)
def test_what_several_programs_cannot_share(options, message, small, write_config, tmp_path):
    hardware = Hardware(world=find_world(0, 2, 1, "head", {}))
    with pytest.raises(UserError, match=message):
        run_recipe(
            load_recipe(write_config(small)),
            hardware,
            Options(save_dir=tmp_path / "run", **options),
        )
    assert not (tmp_path / "run" / ".lock").exists()


def test_processes_on_one_cpu_do_not_multiply_its_cores():
    """A record said "2 x 2 CPU cores" of two processes of torchrun on a machine with two cores."""
    around = dict(zip(("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "2002", strict=True))
    world = find_world(0, environment={**around, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    assert Hardware(name="2 CPU cores", world=world).describe() == "2 processes, 2 CPU cores on each machine"
    assert Hardware(2, "V100", (7, 0), ("0", "1"), world).describe() == "2 x V100"
    assert Hardware(name="2 CPU cores").describe() == "2 CPU cores"
