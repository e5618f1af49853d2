"""The password of Redis out of a file, so that it is in no command line and no environment."""

from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.credentials import CredentialProvider

from outrider.errors import ConfigError


class PasswordFile(CredentialProvider):
    """A user's password, read anew for each connection: it can change while a service runs."""

    def __init__(self, path: str, user: str) -> None:
        self._path = Path(path)
        self._user = user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The password, after the user if there is one."""
        # A few bytes of a mounted file, at connecting only.
        password = self._path.read_text().rstrip("\r\n")
        return (self._user, password) if self._user else (password,)


def with_password_file(url: str, password_file: str) -> tuple[str, PasswordFile | None]:
    """The URL without its user, and who knows user and password; as it is without a file.

    Raises:
        ConfigError: the URL has a password as well, or the file can't be read.
    """
    if not password_file:
        return url, None
    parts = urlsplit(url)
    if parts.password is not None:
        raise ConfigError("--redis-url has a password, and --redis-password-file another one")
    credentials = PasswordFile(password_file, unquote(parts.username or ""))
    try:
        credentials.get_credentials()
    except OSError as error:
        raise ConfigError(
            f"can't read --redis-password-file {password_file}: {error.strerror}"
        ) from error
    address = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=address)), credentials
