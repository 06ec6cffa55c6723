"""Sandboxes in cells: a client of ``exocell serve``.

    from exocell import Sandbox

    with Sandbox.create() as sandbox:
        sandbox.files.write("/job/main.py", "print(6 * 7)")
        print(sandbox.commands.run("python3 /job/main.py").stdout)

:class:`AsyncSandbox` is the same for asyncio. Names and habits are those of
E2B's SDK; only the standard library is used.

Adapters to other projects are modules of their own: :mod:`exocell.harbor`,
:mod:`exocell.inspect_ai`, :mod:`exocell.nemo_gym` and
:mod:`exocell.deepagents`. They need no server.
"""

from ._commands import AsyncCommandHandle, AsyncCommands
from ._errors import (
    BrokenOffException,
    CommandExitException,
    InvalidArgumentException,
    IsDirectoryException,
    NotFoundException,
    PermissionException,
    SandboxException,
    TimeoutException,
    TooLargeException,
)
from ._files import AsyncFiles
from ._sandbox_async import AsyncSandbox
from ._sandbox_sync import CommandHandle, Commands, Files, Sandbox
from ._types import (
    CommandResult,
    EntryInfo,
    FileType,
    Output,
    ProcessInfo,
    SandboxInfo,
    SandboxState,
)

__all__ = [
    "AsyncCommandHandle",
    "AsyncCommands",
    "AsyncFiles",
    "AsyncSandbox",
    "BrokenOffException",
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "Commands",
    "EntryInfo",
    "FileType",
    "Files",
    "InvalidArgumentException",
    "IsDirectoryException",
    "NotFoundException",
    "Output",
    "PermissionException",
    "ProcessInfo",
    "Sandbox",
    "SandboxException",
    "SandboxInfo",
    "SandboxState",
    "TimeoutException",
    "TooLargeException",
]
