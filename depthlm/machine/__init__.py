"""The machine that a process runs on: device, memory, versions."""
