"""What a sandbox tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class CommandResult:
    """How a command ended, and what it wrote."""

    stdout: str
    stderr: str
    exit_code: int


@dataclass(frozen=True)
class Output:
    """A piece of what a command writes; one of both is empty."""

    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class ProcessInfo:
    """A command that runs."""

    pid: int
    cmd: str


class FileType(Enum):
    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True)
class EntryInfo:
    """A file, a directory or something else with a name."""

    name: str
    path: str
    type: FileType
    #: Bytes.
    size: int
    #: Permission bits.
    mode: int


class SandboxState(Enum):
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox that there is."""

    sandbox_id: str
    name: str
    template: str
    state: SandboxState
    metadata: Mapping[str, str]
    #: Seconds since the epoch.
    started_at: int
