"""The locations of depthlm's code and of its configuration files."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# a checkout, a copy of a checkout that was submitted to a cluster, or site-packages
REPOSITORY = PACKAGE.parent
# a wheel contains the configuration inside the package
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else REPOSITORY / "conf"
IS_CHECKOUT = CONF.parent == REPOSITORY


def command(script: str, name: str) -> str:
    """Return how the user runs a command: `python <script>` in a checkout, else `depthlm <name>`."""
    return f"python {script}" if IS_CHECKOUT else f"depthlm {name}"


def install_command(extra: str = "") -> str:
    """Return the shell command that installs depthlm, or one of its extras, in this environment."""
    if IS_CHECKOUT:
        return f"pip install -e '.[{extra}]' -c constraints.txt" if extra else "pip install -e . -c constraints.txt"
    return f"pip install 'depthlm[{extra}]'" if extra else "pip install --upgrade depthlm"
