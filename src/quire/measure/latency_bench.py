"""Latency models of engines: fitted to measured steps or to logs of a server's, kept, and chosen by settings."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cache.costs import LATENCY
from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.members import ROLES
from quire.config import EngineConfig, RetainConfig
from quire.engine.engine import Engine
from quire.engine.machine import hardware_of
from quire.engine.step_log import read_steps
from quire.errors import ConfigError
from quire.measure.engines import Progress
from quire.measure.latency_points import POINTS, Limits
from quire.measure.latency_steps import Measurement, measure
from quire.models.fingerprint import fingerprint
from quire.models.resolve import resolve_model
from quire.offload.planning.plan import step_time
from quire.offload.planning.profile import Profile, profile_of
from quire.records import read_record
from quire.timing.kept_latencies import keep, kept_folder, kept_models, unmeasured, unsuitable
from quire.timing.latency import KINDS, QUANTILES, About, LatencyModel, Link, StepTime
from quire.timing.latency_fit import Record, fit
from quire.version import __version__

if TYPE_CHECKING:
    from quire.llm import LLM

log = logging.getLogger("quire")


@dataclass(frozen=True)
class FittedSteps:
    """A latency model, and the steps that it is fitted to.

    measured  how the steps were measured; None: they are those of logs
    """

    model: LatencyModel
    records: Sequence[Record]
    measured: Measurement | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Facts about the steps of each kind: number, median seconds, and how far the model is from them."""
        rows = []
        for kind in (kind for kind in KINDS if self.model.counts.get(kind)):
            times = [seconds for work, seconds in self.records if work.kind == kind]
            residuals = {name: self.model.residuals[f"{kind}.{name}"] for name in (*QUANTILES, "within", "total")}
            rows.append({"kind": kind, "steps": len(times), "median_seconds": statistics.median(times), **residuals})
        return rows

    def keep(self) -> str:
        """Keeps the model for later simulations and plans. Returns why it was not kept, for people; empty: it was."""
        if lacking := unmeasured(self.model):
            return f"not kept for later simulations: no {lacking} were measured; raise --seconds"
        try:
            is_kept = keep(self.model, kept_folder()) is not None
        except ConfigError as error:
            return f"not kept for later simulations: {error}"
        return "" if is_kept else "the kept model of these settings says more and stays; raise --seconds"


def fit_engine(
    llm: LLM,
    name: str,
    seconds: float,
    kinds: Sequence[str] = POINTS,
    progress: Progress = lambda done, total: None,
) -> FittedSteps:
    """Measures steps of an idle engine for some seconds, and fits a model to them.

    name   as for `LLM`
    kinds  of points
    Raises ModelError if the model's logits are not finite.
    """
    found = measure(llm.engine, seconds, progress=progress, kinds=kinds)
    about = about_of(llm.model_name, fingerprint(resolve_model(name)), llm.config, llm.engine)
    return FittedSteps(fit(found.records, about, links_of(llm.engine, llm.config)), found.records, found)


def fit_logs(name: str, files: Sequence[Path]) -> FittedSteps:
    """Fits a model to logs of steps. name: of the engines' model. Raises ConfigError for logs of another one."""
    logged = read_steps(files)
    model_id = fingerprint(resolve_model(name))
    if logged.model != model_id:
        raise ConfigError(f"the logs are of engines of another model than {name}")
    about = {"model": name, **settings_of(model_id, logged.config, logged.hardware)}
    link = "disk" if logged.config.tiers.disk is not None else logged.transport
    links = {link: Link(LATENCY, statistics.median(logged.speeds))} if link and logged.speeds else {}
    return FittedSteps(fit(logged.records, about, links), logged.records)


class LatencyFiles:
    """Where the seconds of a command's instances come from: files of `quire bench latency` or of `quire plan hardware`,
    or else kept models.

    words  FILE, or ROLE=FILE for instances of one role. Empty: kept models
    name   of the model, as for `LLM`
    Raises ConfigError for a file that is neither a latency model nor a profile.
    """

    def __init__(self, words: Sequence[str], name: str) -> None:
        self._name, self._is_given = name, bool(words)
        self._told = set[str]()
        self.sources: list[tuple[str, str, LatencyModel | Profile]] = []  # role, or empty for all; file; source
        for word in words:
            role, equals, file = word.partition("=")
            if not equals or role not in ROLES:
                if equals and not Path(word).exists():
                    raise ConfigError(f"--latency {word}: no such file, and no role of {', '.join(ROLES)}")
                role, file = "", word
            self.sources.append((role, file, read_step_time(Path(file))))
        if not words:
            self.sources = [("", str(path), model) for path, model in kept_models(kept_folder())]

    def of(self, role: str, config: EngineConfig, model_id: str) -> StepTime:
        """The seconds of instances of a role. Of several suitable sources, one for this role comes first.

        config    configuration without automatic values
        model_id  fingerprint of the checkpoint
        Raises ConfigError with the mismatch, or with the command that makes a model.
        """
        wanted, reasons = settings_of(model_id, config), list[str]()
        for own, file, source in sorted(self.sources, key=lambda each: each[0] == ""):
            if own not in ("", role):
                continue
            if isinstance(source, Profile):
                try:
                    return step_time(source, self._name, config)
                except ConfigError as error:
                    reason = str(error)
            else:
                reason = unsuitable(source, wanted, role, is_given=self._is_given)
                if not reason:
                    if not self._is_given and file not in self._told:
                        self._told.add(file)  # nobody has named it
                        date = source.about.get("date", "an unknown date")
                        log.warning("the seconds of steps are those of %s, kept in %s", date, file)
                    return source
            reasons.append(f"{file}: {reason}")
        if self._is_given:
            raise ConfigError(reasons[0] if reasons else f"no --latency is for instances with the role {role}")
        raise ConfigError(
            f"no latency model is kept for {self._name} with these settings; make one with quire bench latency"
            f" {self._name} --runtime.threads {config.runtime.threads}, give a file as --latency FILE, or name"
            " --hardware"
        )


def read_step_time(path: Path) -> LatencyModel | Profile:
    """A latency model, or a profile of a machine. Raises ConfigError that names the file, and the field if one is
    invalid.
    """
    return read_record(path, "latency model", _step_time_of)


def _step_time_of(fields: Any) -> LatencyModel | Profile:
    if not isinstance(fields, dict) or not {"conditions", "coefficients"}.intersection(fields):
        raise ConfigError(
            "neither a latency model nor a profile; quire bench latency MODEL --output FILE makes a model"
        )
    return profile_of(fields) if "conditions" in fields else LatencyModel.of(fields)


def links_of(engine: Engine, config: EngineConfig) -> dict[str, Link]:
    """How fast the engine's tiers read, as measured at its start and since: empty without tiers."""
    speed = engine.scheduler.manager.fetching.costs.speed
    if speed is None or not config.tiers.is_on:
        return {}
    return {"disk" if config.tiers.disk is not None else "pinned": Link(LATENCY, speed)}


def settings_of(model_id: str, config: EngineConfig, hardware: Mapping[str, str | None] | None = None) -> About:
    """What the seconds of steps depend on, for `latency.mismatch`.

    model_id  fingerprint of the checkpoint
    config    without automatic values
    hardware  as of `hardware_of`, as far as it is known; None: that of this process
    """
    return {
        "fingerprint": model_id,
        "dtype": config.model.dtype,
        "weights": config.model.weights,
        "codec": config.cache.codec,
        "outlier_slots": config.cache.outlier_slots if config.cache.is_calibrated else None,
        "sparse_values": config.cache.sparse_values,
        "retain": retention_text(config.retain),
        "offload": config.offload.mode,
        "backend": config.attention.backend,
        "threads": config.runtime.threads if config.runtime.device == "cpu" else None,
        **(hardware_of(config.runtime) if hardware is None else hardware),
        "tp": 1,
        "pp": 1,
    }


def about_of(name: str, model_id: str, config: EngineConfig, engine: Engine) -> About:
    """All that a latency model says about its origin: `settings_of`, and what is good to know."""
    limits = Limits.of(engine)
    return {
        "model": name,
        **settings_of(model_id, config),
        "token_budget": limits.budget,
        "max_running": limits.running,
        "max_context": limits.context,
        "cache_tokens": limits.tokens,
        "bytes_per_token": engine.scheduler.manager.statistics.chunk_bytes / PAGE_TOKENS,
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def retention_text(retain: RetainConfig) -> str:
    """The settings of retention in one line; `off` without it."""
    if not retain.is_on:
        return "off"
    fields = {each.name: getattr(retain, each.name) for each in dataclasses.fields(retain)}
    if retain.budget != "off":
        return f"budget {retain.budget:g}, profile_rows {retain.profile_rows}"
    del fields["budget"]
    return ", ".join(f"{name} {value}" for name, value in fields.items())
