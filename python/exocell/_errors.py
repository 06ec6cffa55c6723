"""What can go wrong. Every exception here is a :class:`SandboxException`."""

from __future__ import annotations


class SandboxException(Exception):
    """The server refused, or could not be understood."""

    #: What a command had written when this ended the wait for it.
    stdout: str = ""
    stderr: str = ""


class BrokenOffException(SandboxException):
    """The server went away in the middle."""


class TimeoutException(SandboxException):
    """Something took longer than its caller allowed."""


class InvalidArgumentException(SandboxException):
    """The server could not do this for anybody."""


class NotFoundException(SandboxException):
    """There is no such sandbox, image, file or port."""


class IsDirectoryException(SandboxException):
    """A file was asked for where there is a directory."""


class PermissionException(SandboxException):
    """The sandbox's user may not do this."""


class TooLargeException(SandboxException):
    """There is more than the caller wants."""


class CommandExitException(SandboxException):
    """A command ended with another exit code than 0."""

    def __init__(self, stdout: str, stderr: str, exit_code: int) -> None:
        last = stderr.strip().splitlines()[-1:]
        said = f": {last[0]}" if last else ""
        super().__init__(f"the command ended with exit code {exit_code}{said}")
        self.stdout = stdout
        self.stderr = stderr
        self.exit_code = exit_code
