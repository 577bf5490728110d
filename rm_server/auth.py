"""Who may call: API keys, kept as hashes, checked before a request's body is read.

A key file holds one key a line as ``sha256:HEX NAME``; the name is for the log. ``python -m rm_server.auth NAME`` makes
a key and its line. A file that changes is read again, so that keys come and go without a restart.

Invariant: every route but the open ones needs a key once a key file is set; ``/admin`` routes need an admin key always.
A key is never stored, compared or logged in the clear, and comparing takes the same time whichever key was sent.
"""

import hashlib
import hmac
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rm_server.edge import error_response
from rm_server.errors import ForbiddenError, ServerError, UnauthorizedError
from rm_server.settings import SettingsError

logger = logging.getLogger("rm_server")

RELOAD_SECONDS = 1.0
"""A key file is looked at this often at most, and only when a request comes."""
MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
_LINE = re.compile(r"sha256:([0-9a-f]{64})(?:[ \t]+([A-Za-z0-9._@-]{1,64}))?")
_SCOPE_KEY, _ADMIN_KEY = "rm_server.key_name", "rm_server.is_admin"


class KeyFileError(SettingsError):
    """A key file that cannot be used; one line that names the file and the line, and quotes nothing of it."""


def hash_key(key: str) -> str:
    """What a key file says of a key."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class KeyFile:
    """The keys of one file. Raises KeyFileError when it is made; later, a file that cannot be used changes nothing."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._stamp, self._names = self._load()
        self._checked_at = clock()

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, digests: Iterable[bytes]) -> str | None:
        """The name of the key that has one of these digests, or None. Looks at every key, whichever fits."""
        self._reload()
        found = None
        for digest in digests:
            for known, name in self._names.items():
                if hmac.compare_digest(known, digest):
                    found = name
        return found

    def _reload(self) -> None:
        now = self._clock()
        if now - self._checked_at < RELOAD_SECONDS:
            return
        self._checked_at = now
        try:
            if _stamp_of(self._path) == self._stamp:
                return
            stamp, names = self._load()
        except (KeyFileError, OSError) as error:
            reason = error if isinstance(error, KeyFileError) else f"{self._path}: {error.strerror or 'cannot be read'}"
            if self._stamp is not None:
                logger.error("%s; the %d keys read earlier stay valid", reason, len(self._names))
                self._stamp = None
            return
        logger.info("%s: %d keys read again", self._path, len(names))
        self._stamp, self._names = stamp, names

    def _load(self) -> tuple[tuple[int, ...] | None, dict[bytes, str]]:
        try:
            stamp = _stamp_of(self._path)
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeyFileError(f"{self._path}: cannot be read: {error.strerror or 'unknown error'}") from None
        if len(data) > MAX_FILE_BYTES:
            raise KeyFileError(f"{self._path}: is over {MAX_FILE_BYTES} bytes, which no key file is")
        names: dict[bytes, str] = {}
        for number, raw in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise KeyFileError(
                    f"{self._path}:{number}: must be sha256:HEX NAME; make a key with python -m rm_server.auth NAME"
                )
            names[bytes.fromhex(match[1])] = match[2] or f"key-{number}"
        if not names:
            raise KeyFileError(f"{self._path}: holds no key; make one with python -m rm_server.auth NAME")
        if len(names) > MAX_KEYS:
            raise KeyFileError(f"{self._path}: {len(names)} keys are over the limit of {MAX_KEYS}")
        return stamp, names


def _stamp_of(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


class Keys:
    """The keys of a server. Without ``api`` everyone may score; without ``admin`` nobody may use ``/admin``."""

    def __init__(self, api: KeyFile | None = None, admin: KeyFile | None = None) -> None:
        self.api = api
        self.admin = admin

    @classmethod
    def from_files(cls, api: str | None, admin: str | None) -> "Keys":
        """Read the files that are given. Raises KeyFileError."""
        return cls(KeyFile(Path(api)) if api else None, KeyFile(Path(admin)) if admin else None)


class RequireKeys:
    """ASGI middleware: lets open paths and holders of a key through, before anything of the body is read."""

    def __init__(
        self, app: ASGIApp, keys: Keys, open_paths: Collection[str], on_refusal: Callable[[ServerError], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._check(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        self._on_refusal(error)
        await error_response(error)(scope, receive, send)

    def _check(self, scope: Scope) -> ServerError | None:
        digests = [hashlib.sha256(key).digest() for key in _sent_keys(scope)]
        admin_name = self._keys.admin.name_of(digests) if self._keys.admin and digests else None
        name = self._keys.api.name_of(digests) if self._keys.api and digests else None
        scope[_ADMIN_KEY] = admin_name is not None
        scope[_SCOPE_KEY] = admin_name or name
        path = scope["path"]
        is_admin_path = path == "/admin" or path.startswith("/admin/")
        if path in self._open_paths:
            return None
        if is_admin_path:
            return _why_not_admin(self._keys, bool(digests), scope)
        if self._keys.api is None or scope[_SCOPE_KEY] is not None:
            return None
        return UnauthorizedError("the API key is not known" if digests else _NO_KEY)


_NO_KEY = "an API key is needed: send it as Authorization: Bearer KEY, or as X-API-Key: KEY"


def _why_not_admin(keys: Keys, has_sent_key: bool, scope: Scope) -> ServerError | None:
    if keys.admin is None:
        return ForbiddenError("the admin routes are off; start the server with --admin-keys-file to use them")
    if scope[_ADMIN_KEY]:
        return None
    if scope[_SCOPE_KEY] is not None:
        return ForbiddenError("this API key may score, but the admin routes need an admin key")
    return UnauthorizedError("the admin key is not known" if has_sent_key else _NO_KEY.replace("API", "admin"))


def require_admin(request: Request) -> None:
    """FastAPI dependency of every admin route: ``dependencies=[Depends(require_admin)]``.

    ``RequireKeys`` has said why before; this keeps a route closed that is mounted elsewhere. Raises ForbiddenError.
    """
    if request.scope.get(_ADMIN_KEY) is not True:
        raise ForbiddenError("this route needs an admin key")


def key_name(scope: Scope) -> str | None:
    """The name of the key that a request came with, for the log; None where it had none or an unknown one."""
    name = scope.get(_SCOPE_KEY)
    return name if isinstance(name, str) else None


def _sent_keys(scope: Scope) -> list[bytes]:
    """What was sent as a key, two at most: the first bearer token and the first X-API-Key."""
    sent: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            sent.setdefault(name, value.strip())
        elif name == b"authorization":
            kind, _, token = value.partition(b" ")
            if kind.lower() == b"bearer":
                sent.setdefault(name, token.strip())
    return [key for key in sent.values() if key]


def main() -> None:
    """Make a key: the key itself on stderr, its line for the key file on stdout (``>> keys.txt``)."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    key = "rm-" + secrets.token_urlsafe(32)
    line = f"{hash_key(key)} {name}"
    if _LINE.fullmatch(line) is None or name.startswith("-"):  # --help is a question
        print("usage: python -m rm_server.auth NAME >> KEYS.txt (a name of A-Z a-z 0-9 . _ @ -)", file=sys.stderr)
        sys.exit(2)
    print(line)
    print(f"the key of {name}, shown only now: {key}", file=sys.stderr)


if __name__ == "__main__":
    main()
