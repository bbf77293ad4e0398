"""Where the code of depthlm lies, and its configuration files."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# a checkout, a copy of one that was submitted to a cluster, or the folder of installed packages
REPOSITORY = PACKAGE.parent
# a wheel carries the configuration inside the package
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else REPOSITORY / "conf"
IS_CHECKOUT = CONF.parent == REPOSITORY


def command(script: str, name: str) -> str:
    """How a person runs a command from here: `python <script>` in a checkout, else `depthlm <name>`."""
    return f"python {script}" if IS_CHECKOUT else f"depthlm {name}"


def install_command(extra: str = "") -> str:
    """What installs depthlm, or one of its extras, here."""
    if IS_CHECKOUT:
        return f"pip install -e '.[{extra}]' -c constraints.txt" if extra else "pip install -e . -c constraints.txt"
    return f"pip install 'depthlm[{extra}]'" if extra else "pip install --upgrade depthlm"
