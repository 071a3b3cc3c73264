"""A C++ compiler with a cache of object files: CXX="python scripts/cached_compiler.py FOLDER g++".

The command and the preprocessed source identify an object, so a changed header recompiles only the files that include
it. Every command but a plain compilation goes directly to the compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Compiles, or copies the object of an equal compilation."""
    folder, compiler, *arguments = sys.argv[1:]
    if "-c" not in arguments:
        return subprocess.run([compiler, *arguments]).returncode
    at_source, at_target = arguments.index("-c") + 1, arguments.index("-o") + 1
    source, target = arguments[at_source], arguments[at_target]
    flags = [part for i, part in enumerate(arguments) if i not in (at_source - 1, at_source, at_target - 1, at_target)]
    preprocessed = subprocess.run([compiler, *flags, "-E", "-P", source], capture_output=True)
    if preprocessed.returncode:
        sys.stderr.buffer.write(preprocessed.stderr)
        return preprocessed.returncode
    key = hashlib.sha256("\0".join([compiler, *flags]).encode() + preprocessed.stdout).hexdigest()
    known = Path(folder) / f"{key}.o"
    if not known.exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        own = known.with_suffix(f".{os.getpid()}")
        done = subprocess.run([compiler, *flags, "-c", source, "-o", str(own)])
        if done.returncode:
            return done.returncode
        own.replace(known)
    shutil.copyfile(known, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
