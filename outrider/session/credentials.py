"""The password of Redis out of a file, so that it is in no command line and no environment."""

from urllib.parse import unquote, urlsplit, urlunsplit

from redis.credentials import CredentialProvider

from outrider.errors import ConfigError
from outrider.reloading import Reloaded, read_file


class PasswordFile(CredentialProvider):
    """A user's password, read anew for connections when the file has changed.

    Raises:
        ConfigError: the file can't be read, or is empty.
    """

    def __init__(self, path: str, user: str) -> None:
        self._user = user
        self._password = Reloaded([path], lambda: _read(path), what="the password of Redis")

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The password, after the user if there is one."""
        password = self._password.get()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same, for asynchronous connections."""
        return self.get_credentials()


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
    address = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=address)), credentials


def _read(path: str) -> str:
    password = read_file(path, "--redis-password-file").decode("utf-8", "replace").rstrip("\r\n")
    if not password:
        raise ConfigError(f"--redis-password-file {path} is empty")
    return password
