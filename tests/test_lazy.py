"""Package attributes that are imported at first use, and the locations of the code."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from depthlm import locations
from depthlm.locations import REPOSITORY, command, install_command


@pytest.mark.parametrize("package", ["depthlm", "depthlm.data", "depthlm.model"])
def test_every_public_name_can_be_imported(package):
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert package != "depthlm" or dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_importing_a_package_does_not_import_torch():
    # a command handles Ctrl-C before it imports anything that takes long
    script = (
        "import sys, depthlm.__main__; assert not {'torch', 'hydra', 'pydantic'} & sys.modules.keys(); "
        "import depthlm.data, depthlm.config, depthlm.model; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0


def test_commands_depend_on_checkout_or_installation(monkeypatch):
    assert locations.IS_CHECKOUT
    assert Path(REPOSITORY, "train.py").is_file()
    assert command("train.py", "train") == "python train.py"
    assert install_command() == "pip install -e . -c constraints.txt"
    assert install_command("slurm") == "pip install -e '.[slurm]' -c constraints.txt"
    monkeypatch.setattr(locations, "IS_CHECKOUT", False)
    assert command("train.py", "train") == "depthlm train"
    assert install_command() == "pip install --upgrade depthlm"
    assert install_command("slurm") == "pip install 'depthlm[slurm]'"
