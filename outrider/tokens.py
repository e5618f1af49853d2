"""API tokens: who a client is, by a secret of which only a hash is kept.

A token is `outrider-ID-SECRET`: the id tells which line of the tokens file it is, the secret is 256
random bits. A tokens file has a line a token,

    ID TENANT ROLE SHA256

with the SHA-256 of the whole token in hexadecimal. The role is `tenant`, or `admin` for who may
also see and drain workers. Empty lines and what follows a `#` count for nothing. A line that is
taken out ends its token. Secrets of that size need no slow hash: nobody can try them out.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.errors import ConfigError
from outrider.reloading import Reloaded, read_file

FLAG = "--tokens"
_TENANT = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_ID = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"outrider-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")


class Role(Enum):
    """What the holder of a token may do."""

    TENANT = "tenant"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose token it is; `digest` is the SHA-256 of the token, in hexadecimal."""

    token_id: str
    tenant: str
    role: Role
    digest: str

    @property
    def line(self) -> str:
        """The line of a tokens file."""
        return f"{self.token_id} {self.tenant} {self.role.value} {self.digest}"


def new_token(tenant: str, role: Role) -> tuple[str, Holder]:
    """A new token, and what is kept of it.

    Raises:
        ConfigError: it can't be the name of a tenant.
    """
    _check_tenant(tenant)
    token_id = secrets.token_hex(4)
    token = f"outrider-{token_id}-{secrets.token_urlsafe(32)}"
    return token, Holder(token_id, tenant, role, _digest(token))


def append(path: str, holder: Holder) -> None:
    """Add a line to a tokens file, which is made for its owner's eyes if it is not there.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        file = os.open(os.path.expanduser(path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(file).st_size
            cut_off = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, (f"\n{holder.line}\n" if cut_off else f"{holder.line}\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"can't write the tokens file {path}: {error.strerror}") from error


class TokenFiles:
    """Whose a token is, as the files say now; threads may share it.

    Raises:
        ConfigError: a file can't be read, or has a line that is none.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._holders = Reloaded(paths, lambda: _read(paths), what="the tokens file")

    def find(self, token: str) -> Holder | None:
        """Whose token it is; None for one that is not in the files."""
        match = _TOKEN.fullmatch(token)
        holder = self._holders.get().get(match[1]) if match else None
        if holder is None or not hmac.compare_digest(holder.digest, _digest(token)):
            return None
        return holder


def _read(paths: Sequence[str]) -> dict[str, Holder]:
    found: dict[str, Holder] = {}
    for path in paths:
        text = read_file(path, FLAG).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            holder = _parse(words, f"{FLAG} {path}, line {number}")
            if holder.token_id in found:
                raise ConfigError(f"{FLAG} {path}, line {number}: another line has this id")
            found[holder.token_id] = holder
    return found


def _parse(words: list[str], where: str) -> Holder:
    roles = {role.value: role for role in Role}
    # The line itself is not repeated: somebody may have written the token there.
    if len(words) != 4 or not _ID.fullmatch(words[0]) or not _DIGEST.fullmatch(words[3]):
        raise ConfigError(f"{where}: not of the form ID TENANT ROLE SHA256")
    _check_tenant(words[1], where)
    if words[2] not in roles:
        raise ConfigError(f"{where}: the role is one of {', '.join(roles)}")
    return Holder(words[0], words[1], roles[words[2]], words[3])


def _check_tenant(tenant: str, where: str = "--tenant") -> None:
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(f"{where}: a tenant is 1 to 128 characters of A-Z a-z 0-9 . _ : @ -")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
