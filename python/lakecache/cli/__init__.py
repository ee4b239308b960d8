"""The command line: `lakecache stats`, `lakecache doctor` and `lakecache clear`.

Exit status 0: done. 1: it could not be done, or something would not work. 2: wrong arguments, or a
directory that is not there. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from lakecache.cli import _clear, _doctor, _stats
from lakecache.errors import ConfigError, LakeCacheError

__all__ = ["main"]

COMMANDS = {"stats": _stats, "doctor": _doctor, "clear": _clear}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; `arguments` are those after the name."""
    options = _parser().parse_args(arguments)
    try:
        status = COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever reads has seen enough; what is left must not fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (LakeCacheError, OSError) as error:
        denied = isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM}
        remedy = "; run it as the user that runs the engine" if denied else ""
        print(f"lakecache: {error}{remedy}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    from lakecache import _core

    parser = argparse.ArgumentParser(prog="lakecache", description="Look after a LakeCache store.")
    parser.add_argument("--version", action="version", version=f"lakecache {_core.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = module.SUMMARY
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("--cache-dir", help="as in the configuration; without: memory only")
        command.add_argument("--ram-dir", help="as in the configuration")
        command.add_argument("--json", action="store_true", help="write JSON instead of text")
        module.add_arguments(command)
    return parser
