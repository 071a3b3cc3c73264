"""The latency models of a command: files of --latency, or models kept by `quire bench latency`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.folders import user_cache

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.planning.latency import About, LatencyModel

ROLES = ("prefill", "decode", "mixed")


def kept_folder() -> Path:
    """The folder of kept latency models. Every .json file there is one."""
    return user_cache() / "latency"


class LatencyFiles:
    """Latency models by role.

    words  FILE, or ROLE=FILE for instances of one role. Empty: kept models
    Raises ConfigError for a file that is no latency model.
    """

    def __init__(self, words: Sequence[str], model: str) -> None:
        from quire.planning.latency import LatencyModel

        self._model = model
        self._is_given = bool(words)
        self.models: list[tuple[str, str, LatencyModel]] = []  # role, or empty for all; file; model
        for word in words:
            role, equals, file = word.partition("=")
            if not equals or role not in ROLES:
                role, file = "", word
            self.models.append((role, file, LatencyModel.read(Path(file))))
        if not words:
            from quire.planning.kept_latencies import kept_models

            self.models = [("", str(path), model) for path, model in kept_models(kept_folder())]

    def of(self, role: str, config: EngineConfig, fingerprint: str) -> LatencyModel:
        """The model for instances of a role. Of several suitable models, one for this role comes first.

        config       configuration without automatic values
        fingerprint  fingerprint of the checkpoint
        Raises ConfigError with the mismatch, or with the command that makes a model.
        """
        from quire.evaluation.latency_bench import settings_of
        from quire.planning.kept_latencies import unmeasured
        from quire.planning.latency import mismatch

        wanted = settings_of(fingerprint, config)
        reasons = []
        for own, file, model in sorted(self.models, key=lambda each: each[0] == ""):
            if own not in ("", role):
                continue
            reason = mismatch(model.about, _needed(model.about, wanted) if self._is_given else wanted)
            if reason is None and (lacking := unmeasured(model, role)):
                reason = f"no {lacking} were measured for it; measure longer with quire bench latency --seconds"
            if reason is None:
                return model
            reasons.append(f"{file}: {reason}")
        if self._is_given:
            raise ConfigError(reasons[0] if reasons else f"no --latency is for instances with the role {role}")
        threads = config.runtime.threads
        raise ConfigError(
            f"no latency model is kept for {self._model} with these settings; make one with quire bench latency"
            f" {self._model} --runtime.threads {threads}, give a file as --latency FILE, or name --hardware"
        )


def _needed(about: About, wanted: About) -> About:
    """The wanted settings that the file states, and with which it must agree."""
    from quire.planning.kept_latencies import SET_BY_USERS

    return {name: wanted[name] for name in SET_BY_USERS if about.get(name) is not None}
