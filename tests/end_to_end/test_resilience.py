"""Two ranks that are killed, signalled and restarted give the result of an uninterrupted run."""

import signal
from collections.abc import Sequence

import pytest

from ..chaos.disturbers import Killer
from ..chaos.runs import Job, finish, newest_step, outcome, same
from .test_train import wait_for_step


@pytest.mark.slow
def test_a_run_killed_at_random_moments_equals_the_uninterrupted_run(small_run, tmp_path, forks):
    def begin(overrides: Sequence[str]) -> Job:
        text = tmp_path / "output.txt"
        with text.open("w") as output:
            ranks = forks.start_ranks(["train.py", *overrides], stdout=output.fileno())
        return Job(ranks, text.read_text)

    shared = ("deepspeed=zero1", "training.max_steps=60", "training.checkpoint_every=3", "training.validate_every=10",
              "training.validation_tokens=500", "training.rank_timeout=5")  # fmt: skip
    overrides = small_run(*shared, name="killed")
    killer = Killer(tmp_path / "killed", seed=0)
    assert not killer.disturb(overrides, begin, most=3)
    finish(overrides, begin)
    finish(small_run(*shared, name="undisturbed"), begin)
    killed, undisturbed = (outcome(tmp_path / name) for name in ("killed", "undisturbed"))
    assert {"saving", "resuming"} <= {kill["state"] for kill in killer.events}
    assert len(undisturbed["curve"]) == 60
    assert same(killed, undisturbed)


@pytest.mark.slow
def test_a_signal_to_one_rank_makes_all_ranks_save_and_exit_for_a_requeue(small_run, tmp_path, forks):
    overrides = small_run("deepspeed=zero1", "training.max_steps=100000", "training.checkpoint_every=100000")
    ranks = forks.start_ranks(["train.py", *overrides])
    wait_for_step(tmp_path / "run", 3, ranks[0])
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [75, 75], outputs
    stopped_at = newest_step(tmp_path / "run")
    assert f"stopped by a signal after step {stopped_at}; the same command resumes" in outputs[0]
    assert (tmp_path / f"run/checkpoints/step-{stopped_at:08d}/manifest.json").exists()
    forks.run_ranks(["train.py", *overrides, f"training.stop_after={stopped_at + 2}"])
    assert newest_step(tmp_path / "run") == stopped_at + 2
