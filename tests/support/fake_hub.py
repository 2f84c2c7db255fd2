"""A Hub on this machine: an HTTP server that keeps repositories in memory and remembers what was asked of it."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATH = re.compile(r"/(?:api/models/)?([^/]+/[^/]+?)(?:/(revision|tree|preupload|commit|resolve)/[^/]+/?(.*))?")


class FakeHub:
    """What it holds: of every repository its files, and what was asked for when it was made."""

    def __init__(self):
        self.repositories, self.wishes = {}, {}
        self.broken = False  # then it takes no commits
        self.sent = {}  # bytes of its answers by path

    def put(self, name, folder):
        files = (path for path in folder.rglob("*") if path.is_file())
        self.repositories[name] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def answer(self, path, body):
        """Return the status, headers and content."""
        if path == "/api/repos/create":
            wish = json.loads(body)
            name = f"{wish['organization']}/{wish['name']}"
            self.wishes[name] = wish
            self.repositories.setdefault(name, {})
            return 200, {}, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":  # of a model card
            return 200, {}, {"errors": [], "warnings": []}
        name, what, file = found.groups() if (found := PATH.fullmatch(path)) else (None, None, None)
        files = self.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, {}
        if what == "resolve":
            content = files.get(file)
            missing = (
                {"X-Error-Code": "EntryNotFound"} if content is None else {"ETag": hashlib.sha1(content).hexdigest()}
            )
            return 200 if content is not None else 404, {"X-Repo-Commit": COMMIT, **missing}, content or b""
        if what == "preupload":
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {}, {"files": [{**each, **how} for each in json.loads(body)["files"]]}
        if what == "commit" and self.broken:
            return 403, {}, {"error": "you may not write here"}
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            return 200, {}, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        rows = [{"type": "file", "path": each, "size": len(files[each]), "oid": COMMIT} for each in files]
        named = [{"rfilename": each} for each in files]
        return 200, {}, rows if what == "tree" else {"id": name, "sha": COMMIT, "siblings": named}


@contextmanager
def fake_hub(patch, cache):
    """Give a Hub that huggingface_hub takes for the real one, with an empty cache."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self):
            path = unquote(urlsplit(self.path).path)
            status, headers, content = hub.answer(path, b"".join(self.body()))
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if span and status == 200:
                status, content = 206, content[int(span[1]) : int(span[2]) + 1]
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                hub.sent[path] = hub.sent.get(path, 0) + len(content)
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = reply

        def body(self):
            if self.headers.get("Transfer-Encoding") != "chunked":
                yield self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with patch.context() as context:
            context.setattr(constants, "HF_HUB_OFFLINE", False)
            context.setattr(constants, "ENDPOINT", hub.url)
            context.setattr(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            )
            context.setattr(constants, "HF_HUB_CACHE", str(cache))
            yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
