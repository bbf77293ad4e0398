"""A Hugging Face hub on 127.0.0.1 that serves folders.

It has the part of the HTTP API that the libraries use.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class FakeHub(str):
    """The url, for HF_ENDPOINT.

    Attributes: requests, "METHOD path" of each request so far; drops, by file name, the numbers of bytes that the next
    downloads send before the connection is cut; gated, repositories that list their files but refuse to serve them;
    page, the number of entries per page of a listing; nulls, repositories and verbs of the API that are answered with
    null.
    """

    def __init__(self, url: str) -> None:
        self.requests: list[str] = []
        self.drops: dict[str, list[int]] = {}
        self.gated: set[str] = set()
        self.page = 1000
        self.nulls: set[tuple[str, str]] = set()
        self._branches: dict[tuple[str, str], str] = {}
        self._commits: dict[tuple[str, str], Path] = {}

    def publish(self, name: str, folder: Path) -> str:
        """Make the folder the newest commit of "datasets/<repository>" or "<model>", of "@<branch>" or main."""
        repo, _, branch = name.partition("@")
        sha = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        self._branches[repo, branch or "main"] = sha
        self._commits[repo, sha] = folder
        return sha

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses only this hub and has its cache in `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return kept | {"HF_ENDPOINT": self, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"} | more

    def data_requests(self) -> list[str]:
        """Return the names of the data files whose content was requested."""
        return [request.rpartition("/")[2] for request in self.requests if request.startswith("GET /cdn/")]

    def has(self, repo: str) -> bool:
        return any(repo == name for name, _ in self._commits)

    def commit(self, repo: str, revision: str) -> tuple[str, Path | None]:
        sha = self._branches.get((repo, revision), revision)
        return sha, self._commits.get((repo, sha))


@contextmanager
def fake_hub(repos: Mapping[str, Path]) -> Iterator[FakeHub]:
    """Serve {"datasets/allenai/c4": folder, "datasets/a/b@refs/convert/parquet": folder, "a/model": folder}.

    The libraries read HF_ENDPOINT when they are imported: start a process with `environment`.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    for name, folder in repos.items():
        hub.publish(name, folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: two packets would delay each other.
    wbufsize = 2**16

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {unquote(self.path)}")
        url = urlsplit(self.path)
        # A branch may contain slashes, which are quoted, so split before unquoting.
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "cdn":
            self._file("/".join(parts[1:3]) if parts[1] != "datasets" else "/".join(parts[1:4]), parts)
        elif parts == ["api", "agent-harnesses"]:
            self._json({"standardEnvVars": [], "harnesses": {}})
        elif parts[0] == "api":
            prefix = "datasets/" if parts[1] == "datasets" else ""
            self._api(prefix + "/".join(parts[2:4]), parts[4:], parse_qs(url.query))
        elif "resolve" in parts:
            at = parts.index("resolve")
            self._resolve("/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]))
        else:
            self._fail(404, "")

    def do_POST(self) -> None:
        self.hub.requests.append(f"{self.command} {unquote(self.path)}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = parse_qs(body.decode())
        parts = [unquote(part) for part in self.path.strip("/").split("/")]
        repo = ("datasets/" if parts[1] == "datasets" else "") + "/".join(parts[2:4])
        if commit := self._folder(repo, parts[5]):
            entries = {entry["path"]: entry for entry in _tree(commit[1], commit[1], recursive=True)}
            self._json([entries[path] for path in form["paths"] if path in entries])

    def _folder(self, repo: str, revision: str) -> tuple[str, Path] | None:
        sha, folder = self.hub.commit(repo, revision)
        if folder is None:
            self._fail(404, "RevisionNotFound" if self.hub.has(repo) else "RepoNotFound")
            return None
        return sha, folder

    def _api(self, repo: str, rest: Sequence[str], query: dict[str, list[str]]) -> None:
        verb, revision = rest[:2] if rest else ("revision", "main")
        if not (commit := self._folder(repo, revision)):
            return
        sha, folder = commit
        if (repo, verb) in self.hub.nulls:
            self._json(None)
        elif verb == "revision":
            siblings = [{"rfilename": e["path"]} for e in _tree(folder, folder, recursive=True) if e["type"] == "file"]
            about = {"id": repo.removeprefix("datasets/"), "sha": sha, "private": False, "siblings": siblings}
            self._json(about)
        elif verb == "tree":
            below = folder / "/".join(rest[2:])
            if not below.is_dir():
                return self._fail(404, "EntryNotFound")
            entries = list(_tree(folder, below, query.get("recursive") == ["true"]))
            start = int(query.get("cursor", ["0"])[0])
            end = start + self.hub.page
            path = self.path.partition("&cursor=")[0]
            more = {"Link": f'<{self.hub}{path}&cursor={end}>; rel="next"'} if end < len(entries) else {}
            self._json(entries[start:end], more)
        else:
            self._fail(404, "")

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        if not (commit := self._folder(repo, revision)):
            return
        sha, folder = commit
        file = folder / path
        if repo in self.hub.gated:
            self._fail(401, "GatedRepo")
        elif not file.is_file():
            self._fail(404, "EntryNotFound", {"X-Repo-Commit": sha})
        elif file.suffix in (".md", ".json", ".py"):
            self._body(file, {"X-Repo-Commit": sha})
        else:
            # Large files are served from another url, as on the real hub.
            about = {"X-Repo-Commit": sha, "X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": _etag(file)}
            self._send(302, about | {"Location": f"{self.hub}/cdn/{repo}/{sha}/{path}"}, b"")

    def _file(self, repo: str, parts: Sequence[str]) -> None:
        at = 1 + len(repo.split("/"))
        folder = self.hub.commit(repo, parts[at])[1]
        assert folder is not None
        # the client follows a redirect that stays on this host, and reads what it would from the redirect
        self._body(folder / "/".join(parts[at + 1 :]), {"X-Repo-Commit": parts[at]})

    def _body(self, file: Path, headers: dict[str, str]) -> None:
        content, status = file.read_bytes(), 200
        headers = headers | {"ETag": _etag(file), "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            if start >= len(content):
                return self._fail(416, "")
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        drops = self.hub.drops.get(file.name) if self.command == "GET" else None
        self._send(status, headers, content, drops.pop(0) if drops else None)

    def _json(self, value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"} | dict(headers or {}), json.dumps(value).encode())

    def _fail(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, ({"X-Error-Code": code} if code else {}) | dict(headers or {}), b"")

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _tree(root: Path, folder: Path, recursive: bool) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.iterdir()):
        name = path.relative_to(root).as_posix()
        oid = hashlib.sha1(name.encode()).hexdigest()
        if path.is_dir():
            yield {"type": "directory", "path": name, "oid": oid, "size": 0}
            if recursive:
                yield from _tree(root, path, recursive)
        else:
            yield {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}


def _etag(file: Path) -> str:
    return f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"'
