"""Makes the calibration that comes with Quire for the embedded model, and writes it into the package.

    python scripts/ship_calibration.py [FILE]

FILE is a calibration of the embedded model; without it one is made with the defaults, which takes a minute or two. Run
this when `calibrate.settings.ALGORITHM` changes. Another machine rounds differently, so that its file has another hash.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from quire.calibrate import CalibrationSettings, calibrate
from quire.calibrate.progress import progress_display
from quire.calibrate.shipped import FOLDER, SUFFIX, pack, unpack
from quire.engine.calibration import Calibration
from quire.models.embedded import pull
from quire.models.fingerprint import fingerprint


def main() -> None:
    """Writes the file and prints its size."""
    path, settings = pull(), CalibrationSettings()
    model = fingerprint(path)
    if len(sys.argv) > 1:
        made = Calibration.load(Path(sys.argv[1]), model)
    else:
        with tempfile.TemporaryDirectory() as folder, progress_display() as progress:
            made = calibrate(path, settings, Path(folder) / "made", progress=progress)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob(f"*{SUFFIX}"):
        old.unlink()
    file = FOLDER / (settings.file(model).name + SUFFIX)
    file.write_bytes(pack(made))
    assert unpack(file, model).hash == made.hash
    print(f"{file}: {file.stat().st_size:,} bytes, hash {made.hash}")


if __name__ == "__main__":
    main()
