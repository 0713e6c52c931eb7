"""A local server of the hub's API over a folder: FOLDER/{datasets,models}/OWNER/NAME/REVISION/..."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    folder: Path

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        raw = self.rfile.read(size).decode()
        form = json.loads(raw) if raw.startswith("{") else dict(p.split("=") for p in raw.split("&") if p)
        self._answer_api(form)

    def do_GET(self):
        if urlsplit(self.path).path.startswith("/api/"):
            self._answer_api({})
        else:
            self._send_file()

    def _answer_api(self, form):
        _, _, kind, owner, name, *rest = urlsplit(self.path).path.split("/")
        action = rest[0] if rest else "revision"
        revision = unquote(rest[1]) if len(rest) > 1 else "main"
        root = self._root(kind, owner, name, revision)
        if root is None:
            return self._json({"error": "Repository or revision not found"}, 404, "RepoNotFound")
        if action == "tree":
            return self._json(self._entries(root, unquote("/".join(rest[2:]))))
        if action == "paths-info":
            paths = form["paths"] if isinstance(form["paths"], list) else [unquote(form["paths"])]
            return self._json([each for path in paths for each in self._entries(root, path, exact=True)])
        files = [{"rfilename": each["path"]} for each in self._entries(root) if each["type"] == "file"]
        about = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": files, "private": False, "tags": []}
        return self._json({**about, "gated": False, "disabled": False, "downloads": 0, "likes": 0})

    def _root(self, kind, owner, name, revision):
        revision = "main" if revision == COMMIT else revision
        root = self.folder / kind / owner / name / revision.replace("/", "%2F")
        return root if root.is_dir() else None

    def _entries(self, root, below="", exact=False):
        found = []
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if (name == below) if exact else name.startswith(below):
                kind = "directory" if path.is_dir() else "file"
                size = 0 if path.is_dir() else path.stat().st_size
                found.append({"type": kind, "path": name, "size": size, "oid": _digest(path)[:40]})
        return found

    def _send_file(self):
        parts = urlsplit(self.path).path.strip("/").split("/")
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        owner, name, _, revision, *inside = parts
        root = self._root(kind, owner, name, unquote(revision))
        path = root and root / unquote("/".join(inside))
        if path is None or not path.is_file():
            self._json({"error": "Entry not found"}, 404, "EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, end, status = 0, len(content), 200
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            begin, end, status = int(first), int(last or len(content) - 1) + 1, 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(content[begin:end], status, headers)

    def _json(self, value, status=200, error=None):
        headers = {"Content-Type": "application/json", **({"X-Error-Code": error} if error else {})}
        self._send(json.dumps(value).encode(), status, headers)

    def _send(self, content, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _digest(path):
    return hashlib.sha256(path.read_bytes() if path.is_file() else str(path).encode()).hexdigest()


@contextmanager
def hub_of(folder):
    """The environment in which the hub's libraries ask this server and keep their cache in `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": Path(folder)}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(Path(folder) / "cache"),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
    finally:
        server.shutdown()
        server.server_close()
