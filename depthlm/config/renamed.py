"""Names of older versions that are still accepted: of keys, classes of mechanisms, optimizers and trackers."""

import copy
from typing import Any

KEYS = {"import_from": "init_from", "training.on_bad_numbers": "training.on_nonfinite"}
# the first that a class begins with is replaced
CLASSES = {
    "depthlm.model.connections.cross_attention.GRN": "depthlm.mechanisms.dca.DeepCrossAttention",
    "depthlm.model.connections.deep_cross_attention.GRN": "depthlm.mechanisms.dca.DeepCrossAttention",
    "depthlm.model.connections.hyper_connections.Manifold": "depthlm.mechanisms.mhc.Manifold",
    "depthlm.model.connections.attention_residuals.AttentionResidualsRecency": (
        "depthlm.mechanisms.attention_residuals_recency.AttentionResidualsRecency"
    ),
    "depthlm.model.connections.single_state.ReZero": "depthlm.mechanisms.rezero.ReZero",
    "depthlm.model.connections.single_state.Highway": "depthlm.mechanisms.highway.Highway",
    "depthlm.model.connections.": "depthlm.mechanisms.",
    "depthlm.model.attention.moda.": "depthlm.mechanisms.moda.",
    "depthlm.model.attention.depth_attention.": "depthlm.mechanisms.depth_attention.",
}
# an older configuration has the name of its optimizer, but no class
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"_target_": "torch.optim.AdamW", "momentum": None, "ns_steps": None, "settings": {"fused": True}},
    "muon": {"_target_": "depthlm.optimizers.MuonAndAdamW", "settings": {}},
}


def use_new_names(saved: dict[str, Any]) -> None:
    """Rename, in place, the keys, classes, optimizer and tracker in the saved configuration of an older version."""
    for old, new in KEYS.items():
        section, old_name, new_name = _section(saved, old), old.rpartition(".")[2], new.rpartition(".")[2]
        if old_name in section:
            value, section[old_name] = section[old_name], None
            if value is not None or new_name not in section:
                section[new_name] = value
    for part in ("connection", "attention"):
        settings = _section(saved, f"model.{part}._target_")
        if "_target_" in settings:
            settings["_target_"] = current_class(settings["_target_"])
    optimizer = _section(saved, "optimizer._target_")
    if "_target_" not in optimizer:
        optimizer.update(copy.deepcopy(OPTIMIZERS.get(str(optimizer.get("name")), {})))
    tracker = _section(saved, "tracker.name")
    if "name" in tracker:
        tracker["wandb"] = tracker.pop("name") == "wandb"


def current_class(target: str) -> str:
    """Return today's name of the class of a mechanism."""
    beginning = next((old for old in CLASSES if str(target).startswith(old)), None)
    return target if beginning is None else target.replace(beginning, CLASSES[beginning])


def _section(saved: Any, name: str) -> dict[str, Any]:
    """Return the nested dictionary that contains a key, or an empty one if there is none."""
    for part in name.split(".")[:-1]:
        saved = saved.get(part) if isinstance(saved, dict) else None
    return saved if isinstance(saved, dict) else {}
