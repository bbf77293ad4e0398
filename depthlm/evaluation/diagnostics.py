"""Diagnostics of a mechanism inside a decoder."""

import torch
from torch import Tensor

from depthlm.model import Connection, Decoder, Observer
from depthlm.model.connection import State


@torch.no_grad()
def diagnose(model: Decoder, tokens_bt: Tensor) -> dict[str, float]:
    """Return the maximum over tokens and sublayers of each value of `Connection.diagnostics`."""
    if all(type(connection).diagnostics is Connection.diagnostics for connection in model.connections):
        return {}
    largest: dict[str, Tensor] = {}

    class Diagnoses(Observer):
        def read(self, connection: Connection, state: State) -> None:
            for name, value in connection.diagnostics(state).items():
                largest[name] = torch.maximum(largest[name], value.max()) if name in largest else value.max()

    model(tokens_bt, observer=Diagnoses())
    return {name: float(value) for name, value in largest.items()}
