"""The protocol under which the runs of a sweep train, and whether each run followed it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from depthlm.config import compose_anywhere
from depthlm.config.keys import flatten, in_protocol
from depthlm.config.protocol import protocol_texts
from depthlm.config.schema import Config
from depthlm.report.rows import Row
from depthlm.report.tables import Table, cells
from depthlm.runs.records import RunRecord, recorded_settings


def compose_rows(rows: Sequence[Row], config_dir: str | Path | None) -> list[Config]:
    """Return each row's configuration; rows that differ only in the mechanism share one. Raises ConfigError."""
    composed: dict[tuple[str, ...], Config] = {}
    for row in rows:
        if _protocol(row) not in composed:
            composed[_protocol(row)] = compose_anywhere(row.points[0].checkable(), config_dir)
    return [composed[_protocol(row)] for row in rows]


def _protocol(row: Row) -> tuple[str, ...]:
    apart = ("model", "init_from", "fork_from")
    return tuple(f"{name}={value}" for name, value in sorted(row.settings.items()) if not name.startswith(apart))


def protocol_table(rows: Sequence[Row], configs: Sequence[Config]) -> Table:
    """Return the protocol as a table; differing values are all listed, with their sizes where these are distinct."""
    lines: dict[str, dict[str, list[str]]] = {}
    for row, config in zip(rows, configs, strict=True):
        for name, text in protocol_texts(config).items():
            size = row.settings.get("size", config.size.name)
            sizes_of_text = lines.setdefault(name, {}).setdefault(text, [])
            if size not in sizes_of_text:
                sizes_of_text.append(size)
    table = []
    for name, texts in lines.items():
        sizes = [size for sizes_of_text in texts.values() for size in sizes_of_text]
        by_size = name != "size" and len(texts) > 1 and len(sizes) == len(set(sizes))
        values = [f"{text} ({', '.join(group)})" if by_size else text for text, group in texts.items()]
        table.append(cells([name, "; ".join(values)]))
    return Table(["protocol", "value"], table, words=True)


def trained_otherwise(run: RunRecord, config: Config) -> list[str]:
    """Return `key: value in the run, not value in config` for each protocol setting that a run did not train with."""
    saved, expected = recorded_settings(run.directory), flatten(asdict(config))
    return [
        f"{key}: {saved[key]}, not {value}"
        for key, value in expected.items()
        if key in saved and saved[key] != value and in_protocol(key)
    ]
