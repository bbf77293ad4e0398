"""Makes a page of each notebook, from its cells and their stored outputs."""

from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File
from nbconvert import MarkdownExporter


def on_files(files: Any, config: Any) -> Any:
    """Add the page and the pictures of each notebook under docs/."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        place = PurePosixPath(file.src_uri)
        text, resources = MarkdownExporter().from_filename(str(Path(file.abs_src_path)))
        for name, picture in resources["outputs"].items():
            text = text.replace(f"]({name})", f"]({place.stem}/{name})")
            files.append(File.generated(config, str(place.parent / place.stem / name), content=picture))
        text += f"\n[Download this notebook]({place.name}).\n"
        files.append(File.generated(config, str(place.with_suffix(".md")), content=text))
    return files
