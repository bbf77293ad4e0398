"""The part of the hub's HTTP API that uploads to it: repositories, commits, and large files by LFS."""

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fake_hub import FakeHub

# a status, and the JSON of an answer
Answer = tuple[int, Any]


class Uploads:
    """Repositories of models that a user with the token may create and change.

    Attributes: private, the repositories that are; large, the suffixes of the files that are uploaded by LFS; messages,
    of the commits; fails, by the end of a path, the status with which the next request is refused; 200: answered with
    JSON that the API does not have.
    """

    def __init__(self, hub: "FakeHub", folder: Path, token: str) -> None:
        self.hub, self.folder, self.token = hub, folder, token
        self.private: set[str] = set()
        self.large = (".safetensors", ".png")
        self.messages: list[str] = []
        self.fails: dict[str, int] = {}
        self._large: dict[str, bytes] = {}

    def content(self, repo: str) -> dict[str, bytes]:
        """Return the files of a repository by name."""
        folder = self.hub.commit(repo, "main")[1]
        assert folder is not None
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> Answer | None:
        """Return the answer to a request that uploads, None for any other."""
        if method == "PUT" and (match := re.fullmatch(r"/lfs/(\w{64})", path)):
            assert hashlib.sha256(body).hexdigest() == match[1]
            self._large[match[1]] = body
            return 200, {}
        lfs = re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path)
        if not lfs and not re.fullmatch(r"/api/(repos/create|validate-yaml|models/.+/(preupload|commit)/main)", path):
            return None
        failing = next((end for end in self.fails if path.endswith(end)), None)
        if failing is not None:
            status = self.fails.pop(failing)
            # a proxy may answer with any JSON
            return status, {"error": "as the test wants"} if status != 200 else [1]
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path.endswith("/commit/main"):
            return self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        request = json.loads(body)
        if path == "/api/repos/create":
            return self._create(f"{request['organization']}/{request['name']}", request.get("visibility"))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if lfs:
            actions = [{"upload": {"href": f"{self.hub}/lfs/{entry['oid']}"}} for entry in request["objects"]]
            objects = [entry | {"actions": act} for entry, act in zip(request["objects"], actions, strict=True)]
            return 200, {"transfer": "basic", "objects": objects}
        modes = {name: "lfs" if name.endswith(self.large) else "regular" for name in
                 (entry["path"] for entry in request["files"])}  # fmt: skip
        return 200, {"files": [{"path": k, "uploadMode": mode, "shouldIgnore": False} for k, mode in modes.items()]}

    def _create(self, repo: str, visibility: str | None) -> Answer:
        url = {"url": f"{self.hub}/{repo}"}
        if self.hub.has(repo):
            return 409, url | {"error": "You already created this model repo"}
        self._publish(repo, None)
        if visibility == "private":
            self.private.add(repo)
        return 200, url

    def _publish(self, repo: str, before: Path | None) -> Path:
        folder = self.folder / f"commit-{len(list(self.folder.iterdir()))}"
        if before is None:
            folder.mkdir()
        else:
            shutil.copytree(before, folder)
        self.hub.publish(repo, folder)
        return folder

    def _commit(self, repo: str, body: bytes) -> Answer:
        lines = [json.loads(line) for line in body.splitlines()]
        folder = self._publish(repo, self.hub.commit(repo, "main")[1])
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "header":
                self.messages.append(value["summary"])
                continue
            file = folder / value["path"]
            if kind == "deletedFile":
                file.unlink()
                continue
            file.write_bytes(base64.b64decode(value["content"]) if kind == "file" else self._large[value["oid"]])
        sha = self.hub.commit(repo, "main")[0]
        return 200, {"commitUrl": f"{self.hub}/{repo}/commit/{sha}", "commitOid": sha}
