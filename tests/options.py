"""The options of conf/, for tests that need one without composing a configuration."""

from typing import Any

import yaml

from depthlm.locations import CONF


def option(group: str, name: str) -> dict[str, Any]:
    """Return the settings of an option."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
