"""Files that a command is to write: tried before work begins, so that no result is lost at the end."""

from __future__ import annotations

from pathlib import Path

from syncline.scheduler.errors import SynclineError


class OutputError(SynclineError):
    """A file that was asked for cannot be written."""


def check_outputs(*paths: Path | None) -> None:
    """Open each file for writing, and leave everything as it was. None is no file.

    Raises:
        OutputError: one of them cannot be written.
    """
    for path in paths:
        if path is None or _is_device(path):
            continue
        try:
            there = path.exists()
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error.strerror}): name a file in a folder that exists") from error


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be made a folder ({error.strerror}): name one that may be written") from error


def _is_device(path: Path) -> bool:
    """Such as /dev/stdout: opening it may wait for a reader, or change what is there."""
    return path.exists() and not (path.is_file() or path.is_dir())
