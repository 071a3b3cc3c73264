"""Calibrates in a separate process while an engine serves with dense pages.

The process has the lowest priority and half of the threads, and maps the same layer image as the engine. It writes a
calibration file, and the result of the codec's check. Then the engine switches to the codec: it gets a new cache over
the same weights, at the first moment without requests. After QUIET_SECONDS without such a moment, running requests are
preempted and computed again, as if the cache had been full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any

from quire.calibrate.estimate import duration_text
from quire.codec_check import check_codec
from quire.config import EngineConfig
from quire.engine.build import load_model, resolve
from quire.errors import QuireError
from quire.load import LoadedEngine, calibration_for, calibration_seconds, find_calibration, with_codec
from quire.models import images
from quire.models.fingerprint import fingerprint
from quire.models.image_folder import image_path
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model

log = logging.getLogger("quire")

QUIET_SECONDS = 60.0
"""Longest wait for a moment without requests."""

LOOK_SECONDS = 0.2
"""Interval between checks for such a moment."""

IMAGE_SECONDS = 120.0
"""Longest wait for the layer image that the engine's process may still be writing."""

NICENESS = 19

_BEGIN = f"""
import os, sys
os.nice({NICENESS})
sys.path[:] = sys.argv[1:]
from quire.background_calibration import main
main()
"""

_SHARES = {"writing a text": (0.0, 0.3), "gathering": (0.3, 0.6), "fitting": (0.9, 0.1)}
"""For each phase, its start and its length, about, as shares of the whole."""


class BackgroundCalibration:
    """Makes a calibration beside a running engine, and switches the engine to it.

    loaded  returns the present engine, which serves with dense pages
    submit  runs a command on the engine's thread, between two steps
    adopt   called on the engine's thread with the engine that replaces it
    """

    def __init__(
        self,
        loaded: Callable[[], LoadedEngine],
        submit: Callable[[Callable[[], object]], None],
        adopt: Callable[[LoadedEngine], None],
    ) -> None:
        first = loaded()
        assert first.pending_config is not None, "nothing is to be calibrated"
        self._config, self._path = first.pending_config, first.path
        self._loaded, self._submit, self._adopt = loaded, submit, adopt
        self._seconds = calibration_seconds(self._path, self._config, _threads(first.config)) or 0.0
        self._begun = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._state, self._reason, self._share = "calibrating", "", 0.0
        self._thread = threading.Thread(target=self._run, name="quire-calibrating", daemon=True)

    def start(self) -> None:
        """Starts the process, and a thread that waits for it."""
        log.warning(
            "cache.codec %s needs a calibration of this model: serving with dense pages while it is made, %s on idle"
            " cores; calibrate.when start waits for it",
            self._config.cache.codec,
            duration_text(self._seconds),
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the process. The windows that it has gathered are kept."""
        with self._lock:
            self._closed.set()
            if self._process is not None:
                self._process.terminate()
        if self._thread.ident is not None:
            self._thread.join()

    def report(self) -> dict[str, Any]:
        """The report for operators: the requested codec; the state, which is calibrating, waiting (for a moment without
        requests), taken or failed; the share done; the estimated seconds left; and the reason of a failure.
        """
        passed = time.monotonic() - self._begun
        total = self._seconds if self._share < 0.05 else passed / self._share
        left = max(0.0, total - passed) if self._state == "calibrating" else 0.0
        found = {"codec": self._config.cache.codec, "state": self._state, "done": round(self._share, 3)}
        return found | {"seconds_left": round(left), "reason": self._reason}

    def _run(self) -> None:
        codec = self._config.cache.codec
        try:
            failure = self._calibrate()
            if not self._closed.is_set() and not failure:
                self._take()
        except Exception as error:
            failure = str(error) or type(error).__name__
            if not isinstance(error, QuireError):
                log.exception("the calibration failed")
        if self._closed.is_set():
            return
        if failure:
            self._state, self._reason = "failed", failure
            log.error("cache.codec %s is not taken, and the cache stays dense: %s", codec, failure)
        else:
            self._state, self._share = "taken", 1.0

    def _calibrate(self) -> str:
        """Runs the process. Returns the reason of its failure; empty on success."""
        with self._lock:
            if self._closed.is_set():
                return ""
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C reaches only us; in a session of its own, systems would ignore its niceness
            )
        assert process.stdin is not None and process.stdout is not None
        failure = ""
        with process.stdin, process.stdout, contextlib.suppress(BrokenPipeError):
            json.dump({"path": str(self._path), "options": self._config.to_options()}, process.stdin)
            process.stdin.write("\n")
            process.stdin.flush()
            for line in process.stdout:
                failure = self._read(json.loads(line)) or failure
        status = process.wait()
        return failure or (f"the process ended with status {status}" if status else "")

    def _read(self, line: dict[str, Any]) -> str:
        if "error" in line:
            return str(line["error"])
        start, share = _SHARES.get(line["phase"], (self._share, 0.0))
        self._share = start + share * line["done"] / max(1, line["total"])
        return ""

    def _take(self) -> None:
        """Switches the engine to the calibrated codec."""
        calibration = find_calibration(self._path, self._config)
        if calibration is None:
            raise QuireError("there is no calibration after all")
        with open_model(self._path) as checkpoint:
            resolved, fits = resolve(self._config, checkpoint.shape, checkpoint, calibration)
        self._state, self._share = "waiting", 1.0
        log.info("calibrated for cache.codec %s; taking it when there are no requests", resolved.cache.codec)
        begun = time.monotonic()
        while not self._closed.is_set():
            preempts = time.monotonic() - begun > QUIET_SECONDS
            attempt = functools.partial(
                with_codec, config=resolved, fits=fits, calibration=calibration, preempts=preempts
            )
            if self._attempt(attempt):
                break
            self._closed.wait(LOOK_SECONDS)
        self._attempt(lambda loaded: None)  # when it returns, the engine's thread has dropped the old engine
        _collect()

    def _attempt(self, attempt: Callable[[LoadedEngine], LoadedEngine | None]) -> bool:
        """Runs an attempt to switch on the engine's thread. Returns whether it succeeded. Raises its errors."""
        is_taken: Future[bool] = Future()

        def run() -> None:
            try:
                engine = attempt(self._loaded())
                if engine is not None:
                    self._adopt(engine)
                is_taken.set_result(engine is not None)
            except Exception as error:  # the engine continues with dense pages
                is_taken.set_exception(error)

        self._submit(run)
        while not wait([is_taken], 0.1).done:
            if self._closed.is_set():
                return False
        return is_taken.result()


def _collect() -> None:
    """Frees the old cache. A server has frozen the objects of its start, which collections would skip."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


def _threads(config: EngineConfig) -> int:
    """Threads of the process, from those of the engine."""
    return max(1, (config.runtime.threads or 1) // 2)


# ---- the process -----------------------------------------------------------------------------------------------------


def main(stdin: IO[str] | None = None, stdout: IO[str] | None = None) -> None:
    """The process's program. It reads the model's path and all settings as one line of JSON, and writes progress, and
    the error if there is one, as lines of JSON.
    """
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    given = json.loads(stdin.readline())
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    path, config = Path(given["path"]), EngineConfig.from_options(given["options"])
    last = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 0.5 or done == total:
            last = now
            _say(stdout, {"phase": what, "done": done, "total": total})

    try:
        calibrate_and_check(path, config, report)
    except QuireError as error:
        _say(stdout, {"error": str(error)})


def calibrate_and_check(path: Path, config: EngineConfig, report: Callable[[str, int, int], None]) -> None:
    """Makes and keeps the calibration of a codec, and the result of its check, with half of the threads."""
    with open_model(path) as checkpoint:
        resolved, _ = resolve(config, checkpoint.shape, checkpoint)
        config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, threads=_threads(resolved)))
        _wait_for(images.engine_image_spec(checkpoint, resolved))
        calibration = calibration_for(path, config, report)
        if not config.cache.check:
            return
        resolved, _ = resolve(config, checkpoint.shape, checkpoint, calibration)
        tokenizer = load_tokenizer(path, config.model.tokenizer)
        check_codec(load_model(checkpoint, resolved), tokenizer, resolved, fingerprint(path), calibration)


def _wait_for(wanted: images.ImageSpec | None) -> None:
    """Waits for a layer image that another process writes, because otherwise this one would pack the weights again."""
    end = time.monotonic() + IMAGE_SECONDS
    while wanted is not None and not image_path(wanted.origin).exists() and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)


def _say(stdout: IO[str], line: dict[str, Any]) -> None:
    stdout.write(json.dumps(line) + "\n")
    stdout.flush()


def _end_with(stdin: IO[str]) -> None:
    """Ends this process when its starter closes the pipe or dies."""
    stdin.read()
    os._exit(1)
