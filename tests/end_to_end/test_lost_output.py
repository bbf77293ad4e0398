"""Standard output that cannot be written does not end a run."""

import os


def test_a_run_completes_without_a_reader_of_its_output(small_run, tmp_path, forks):
    # as after `| head`
    reader, stdout = os.pipe()
    os.close(reader)
    with (tmp_path / "stderr").open("w") as stderr:
        process = forks.start(["train.py", *small_run("training.max_steps=10")], stdout=stdout, stderr=stderr.fileno())
        assert process.wait(120) == 0
    os.close(stdout)
    assert not (tmp_path / "run/failure.json").exists()
    log = (tmp_path / "run/train.log").read_text()
    assert log.count("standard output cannot be written") == 1
    assert "step 10/10" in log
    # the first run prepares the tokens
    assert all("prepar" in line for line in (tmp_path / "stderr").read_text().splitlines())
