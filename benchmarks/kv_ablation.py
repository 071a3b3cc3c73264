"""Ablation of the non-uniform codec: perplexity with each of its parts switched off.

    python benchmarks/kv_ablation.py --data DIR                        # DIR has wiki.test.raw; 8 windows of it
    python benchmarks/kv_ablation.py --data DIR --bits 2 --windows 1   # a quick look
    python benchmarks/kv_ablation.py --data DIR --work W --out F       # may be stopped: the same command goes on

SmolLM2 reads WikiText-2's test text in windows of 2,048 tokens, the same windows in every row. There are two base
codecs: ours, as `quire calibrate` makes it, and the paper's (Fisher codebooks, the same bits everywhere). All
calibrations use the same samples, gathered once from text that the model writes, or from --text FILE.

Most rows come from an engine with the calibration in a file: its perplexity and its bytes. The engine cannot store keys
per token, nor after rotation. Rows with a * are therefore simulated (kv_simulation.py) with the codec's own codebooks
and kernels. `nothing *` checks the simulation: it must equal `nothing` within rounding.

Keys per token have a range, a codebook and a width for each head, like values. The bytes of their ranges are not
counted. After rotation, codebooks are made from rotated keys and gradients. Without Fisher information, errors in all
elements cost the same, for codebooks, widths and slots. Without outlier slots, pages are smaller, and so is the budget
of widths.

Ratios are relative to the dense cache's perplexity. The cost of a switch is relative to `nothing`, or for simulated
rows `nothing *`, with the standard error over windows. All rows read the same text, so small differences show. Bits are
per element in full pages, including slots, ranges and padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, commit, format_table, hardware, hardware_line
from kv_simulation import SimulatedPlan, per_channel, per_token, rotation, simulated_loss

from quire.attention.reference import rotate
from quire.calibrate import CalibrationSettings
from quire.calibrate.fit import KINDS, LayerFit, fit_layer
from quire.calibrate.gradients import GradientOps
from quire.calibrate.samples import LayerSamples, gather
from quire.calibrate.settings import CODEC_OF, WINDOW_TOKENS
from quire.calibrate.tables import make_tables
from quire.calibrate.text import generate_windows, windows_from_text
from quire.config import EngineConfig
from quire.engine.calibration import Calibration
from quire.engine.engine import Engine
from quire.evaluation.perplexity import cut_windows, measure
from quire.load import load_engine
from quire.measure.engines import REFERENCE, load_engines
from quire.models.decoder import build_model
from quire.models.fingerprint import fingerprint
from quire.models.layers import torch_dtype
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model

BENCHMARK = "kv_ablation"
CONTEXT = 2048
WIDTHS = tuple(sorted(CODEC_OF, reverse=True))
PARTS = ("keys", "values", "key_grads", "value_grads")


@dataclass(frozen=True)
class Fits:
    """How codebooks are made.

    slots    outlier slots per vector
    rotated  whether keys and the costs of their errors are rotated
    swapped  whether keys take the place of values
    fisher   whether an error's cost is its effect on the loss; otherwise all errors cost the same
    """

    slots: int = 1
    rotated: bool = False
    swapped: bool = False
    fisher: bool = True


@dataclass(frozen=True)
class Variant:
    """A codec.

    kinds      kinds of codebooks to choose from
    spends     whether widths are allocated by their benefit; otherwise all are equal
    sinks      tokens kept exact
    per_token  whether each key has its own range, like values
    simulated  whether the row is simulated instead of run by an engine
    """

    kinds: tuple[str, ...] = KINDS
    spends: bool = True
    fits: Fits = Fits()
    sinks: int = 1
    per_token: bool = False
    simulated: bool = False

    def __str__(self) -> str:
        """The differences from our codec."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(Variant, name)}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "ours"


BASES = {"ours": Variant(), "as in the paper": Variant(kinds=("fisher",), spends=False)}

AFTER = Fits(rotated=True)
SWITCHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "nothing *": {"simulated": True},
    "keys per channel: per token *": {"simulated": True, "per_token": True},
    "keys before rotation: after *": {"simulated": True, "fits": AFTER},
    "both: per token, after rotation *": {"simulated": True, "per_token": True, "fits": AFTER},
    "non-uniform codes: uniform": {"kinds": ("uniform",)},
    "Fisher weights of books: k-means": {"kinds": ("plain",)},
    "outlier slots": {"fits": Fits(slots=0)},
    "sink token": {"sinks": 0},
}
OWN_SWITCHES: dict[str, dict[str, Any]] = {
    "Fisher information at all": {"kinds": ("uniform", "plain", "own"), "fits": Fits(fisher=False)},
    "choice of books: Fisher's": {"kinds": ("fisher",)},
    "damped weights and own books": {"kinds": ("uniform", "plain", "fisher")},
    "books per channel": {"kinds": ("uniform", "plain", "fisher", "damped")},
    "widths per block: same bits": {"spends": False},
}
"""Switches of the parts that the paper does not have."""


def variants(base: str) -> dict[str, Variant]:
    """The variants of a base codec: one for each part that can be switched off."""
    switches = SWITCHES | OWN_SWITCHES if base == "ours" else SWITCHES
    return {name: dataclasses.replace(BASES[base], **changes) for name, changes in switches.items()}


class Samples:
    """Keys, values and gradients of a model over windows of a text, and the codebooks made from them.

    text    None: text that the model writes itself
    folder  stores the samples, one file per window
    """

    def __init__(self, model: str, text: str | None, folder: Path, threads: int) -> None:
        self.path = resolve_model(model)
        self.settings = CalibrationSettings()
        with open_model(self.path) as checkpoint:
            self.shape = checkpoint.shape
        self.window_tokens = min(WINDOW_TOKENS, self.shape.max_context)
        self.model_id = fingerprint(self.path)
        self.text_id = hashlib.sha256((text or f"seed {self.settings.seed}").encode()).hexdigest()[:16]
        folder = folder / f"samples-{self.model_id[:8]}-{self.text_id}"
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{window}.pt" for window in range(self.settings.num_windows)]
        if not all(file.exists() for file in files):
            windows = self._windows(model, text, threads)
            with open_model(self.path) as checkpoint:
                reader = build_model(self.shape, checkpoint, GradientOps(), torch_dtype(self.shape.dtype))
            for file, window in zip(files, windows, strict=True):
                say(f"gathering {file}")
                found: dict[int, dict[str, Tensor]] = {}
                for layer, parts in gather(reader, window):
                    found[layer] = {name: part.to(torch.bfloat16, copy=True) for name, part in parts.items()}
                unfinished = file.with_suffix(".unfinished")
                torch.save(found, unfinished)
                unfinished.replace(file)
        self._gathered = [torch.load(file, mmap=True) for file in files]

    def _windows(self, model: str, text: str | None, threads: int) -> Tensor:
        count = self.settings.num_windows
        if text is not None:
            return windows_from_text(load_tokenizer(self.path), text, count, self.window_tokens)
        options: dict[str, Any] = {"model.max_context": self.window_tokens, "scheduler.max_running": count}
        options |= {"cache.share": False, "runtime.threads": threads, "runtime.device": "cpu"}
        loaded = load_engine(model, EngineConfig.from_options(options))
        seed = self.settings.seed
        return generate_windows(
            loaded.engine, loaded.tokenizer, count, self.window_tokens, seed, lambda done, total: None
        )

    def layer(self, layer: int, fits: Fits) -> LayerSamples:
        """The samples of a layer, over all windows."""
        skip = self.settings.skipped
        found: dict[str, list[Tensor]] = {name: [] for name in PARTS}
        for window in self._gathered:
            for name, parts in found.items():
                part = window[layer][name][skip:].float()
                if fits.rotated and name in ("keys", "key_grads"):
                    positions = torch.arange(skip, skip + len(part))
                    part = rotate(part, rotation(self.shape, self.window_tokens), positions)
                parts.append(part)
        keys, values, key_grads, value_grads = (torch.cat(parts) for parts in found.values())
        if not fits.fisher:
            key_grads, value_grads = torch.ones_like(keys), torch.ones_like(values)
        if fits.swapped:
            keys, values, key_grads, value_grads = values, keys, value_grads, key_grads
        return LayerSamples(keys, values, key_grads.square(), value_grads.square())

    @functools.cache  # noqa: B019, one lives as long as the script
    def fits(self, fits: Fits) -> list[LayerFit]:
        """Codebooks of all kinds and widths for every layer, with their costs."""
        say(f"fitting {fits}")
        held_out = (self.window_tokens - self.settings.skipped) * self.settings.num_held_out
        return [fit_layer(self.layer(layer, fits), held_out, fits.slots) for layer in range(self.shape.num_layers)]

    def calibration(self, variant: Variant) -> Calibration:
        """The calibration that `quire calibrate` makes with these settings."""
        fits, slots = self.fits(variant.fits), variant.fits.slots
        tables, report = {}, {}
        for bits in WIDTHS:
            made = make_tables(fits, bits, slots, kinds=variant.kinds, spends=variant.spends)
            tables[CODEC_OF[bits]], report[CODEC_OF[bits]] = made
        settings = {"variant": str(variant), "text": self.text_id, "outlier_slots": slots}
        return Calibration(self.model_id, tables, settings, report)


Row = Mapping[str, Any]
"""A record: mean `nll` of each window; `bits_per_element`, None if there are no pages."""


class Ablation:
    """Measures variants at widths, and keeps the rows by both. The dense cache is variant None at 16 bits."""

    def __init__(self, given: argparse.Namespace, windows: Sequence[Sequence[int]], work: Path) -> None:
        self._given, self._windows, self._work = given, windows, work
        text = None if given.text is None else given.text.read_text(encoding="utf-8")
        self._samples = Samples(given.model, text, work, given.threads)
        (self._dense,) = self._engines([REFERENCE], {})
        self.settings = {
            "benchmark": BENCHMARK,
            "commit": commit(),
            "model": given.model,
            "context": CONTEXT,
            "windows": len(windows),
            "text": self._samples.text_id,
        }
        self.rows: dict[tuple[str, int], Row] = {}

    def resume(self, file: Path) -> None:
        """Reads the rows of a file that were measured with these settings at this commit."""
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if all(row.get(name) == value for name, value in self.settings.items()):
                self.rows[row["variant"], row["bits"]] = row

    def measure(self, variant: Variant | None, widths: Sequence[int]) -> None:
        """Measures the rows that are missing."""
        name = REFERENCE if variant is None else str(variant)
        widths = [bits for bits in widths if (name, bits) not in self.rows]
        if not widths:
            return
        if variant is None:
            self._ask(name, 16, self._dense)
        elif variant.simulated:
            for bits in widths:
                self._simulate(name, variant, bits)
        else:
            file = self._work / "calibration.safetensors"
            self._samples.calibration(variant).save(file)
            cache = {"calibration": file, "outlier_slots": variant.fits.slots, "sink_tokens": variant.sinks}
            options = {f"cache.{name}": value for name, value in cache.items()}
            engines = self._engines([CODEC_OF[bits] for bits in widths], options)
            for bits, engine in zip(widths, engines, strict=True):
                self._ask(name, bits, engine)

    def _engines(self, codecs: Sequence[str], options: Mapping[str, Any]) -> list[Engine]:
        fixed = {"runtime.threads": self._given.threads, "runtime.device": "cpu", "cache.codec": codecs[0]}
        config = EngineConfig.from_options({**options, **fixed})
        return list(load_engines(self._given.model, config, CONTEXT, codecs)[0].values())

    def _ask(self, name: str, bits: int, engine: Engine) -> None:
        found = [measure({name: engine}, [window])[0] for window in self._windows]
        self._keep(name, bits, [each.nll for each in found], found[0].bits_per_element)

    def _simulate(self, name: str, variant: Variant, bits: int) -> None:
        samples, fits = self._samples, variant.fits
        if variant.per_token:
            keys = samples.fits(dataclasses.replace(fits, swapped=True))
            how: dict[str, Any] = {"kinds": variant.kinds, "spends": variant.spends}
            stored = per_token(keys, samples.fits(fits), bits, fits.slots, **how)
        else:
            stored = per_channel(samples.calibration(variant).tables[CODEC_OF[bits]])
        plan = SimulatedPlan(samples.shape, CONTEXT - 1, stored, rotated=fits.rotated, sinks=variant.sinks)
        self._keep(
            name, bits, [simulated_loss(self._dense.runner.model, window, plan) for window in self._windows], None
        )

    def _keep(self, name: str, bits: int, nll: Sequence[float], element: float | None) -> None:
        row = {**self.settings, "variant": name, "bits": bits, "nll": nll, "bits_per_element": element}
        self.rows[name, bits] = row
        say(f"{bits:2} bits  {math.exp(statistics.fmean(nll)):8.3f}  {name}")
        if self._given.out:
            append_record(self._given.out, row)

    def table(self, bits: int) -> str:
        """The rows of one width, for both bases."""
        words = ("ppl", "ratio", "costs, %", "bits")
        found = {base: variants(base) for base in BASES}
        lines = [
            [name, *(cell for base in BASES for cell in self._cells(base, found[base].get(name), bits))]
            for name in found["ours"]
        ]
        head = [
            "switched off",
            *(f"{base}: {words[0]}" if word == words[0] else word for base in BASES for word in words),
        ]
        return format_table(head, lines, self._given.markdown)

    def _cells(self, base: str, variant: Variant | None, bits: int) -> list[str]:
        if variant is None:
            return [""] * 4
        row = self.rows[str(variant), bits]
        ratio = math.exp(apart(row, self.rows[REFERENCE, 16])[0])
        origin = dataclasses.replace(BASES[base], simulated=variant.simulated)
        if variant == origin:
            origin = BASES[base]
        costs = "-"
        if variant != origin:
            mean, error = apart(row, self.rows[str(origin), bits])
            costs = f"{100 * math.expm1(mean):+.2f}" + (
                "" if error is None else f" ± {100 * math.exp(mean) * error:.2f}"
            )
        element = row["bits_per_element"]
        perplexity = math.exp(statistics.fmean(row["nll"]))
        return [f"{perplexity:.2f}", f"{ratio:.4f}", costs, "-" if element is None else f"{element:.2f}"]


def apart(row: Row, other: Row) -> tuple[float, float | None]:
    """The difference of the losses, and its standard error over windows; None for a single window."""
    losses = [one - two for one, two in zip(row["nll"], other["nll"], strict=True)]
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return statistics.fmean(losses), error


def say(line: str) -> None:
    """Prints progress to standard error."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that has wiki.test.raw")
    parser.add_argument("--text", type=Path, metavar="FILE", help="calibration text; without it the model writes one")
    parser.add_argument("--bits", default="4,3,2", help="comma-separated widths (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=8, help="windows, of the text's 148 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="a model that rotates (default: %(default)s)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps the samples for another run, 0.4 GB")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append one JSON line per row; rows in FILE are not repeated"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    given = parser.parse_args()
    given.bits = [int(word) for word in given.bits.split(",")]
    if unknown := set(given.bits) - set(WIDTHS):
        parser.error(f"--bits {unknown}: there are codecs of {', '.join(map(str, WIDTHS))}")
    return given


def main() -> None:
    """Measures everything, prints the tables."""
    given = arguments()
    torch.set_num_threads(given.threads)
    text = (given.data / "wiki.test.raw").read_text(encoding="utf-8")
    windows = cut_windows(load_tokenizer(resolve_model(given.model)).encode(text), CONTEXT)[: given.windows]
    with tempfile.TemporaryDirectory() as folder:
        ablation = Ablation(given, windows, given.work or Path(folder))
        if given.out and given.out.exists():
            ablation.resume(given.out)
        ablation.measure(None, [16])
        for variant in dict.fromkeys(each for base in BASES for each in variants(base).values()):
            ablation.measure(variant, given.bits)
    for bits in given.bits:
        print(f"{bits} bits\n\n{ablation.table(bits)}\n")
    dense = math.exp(statistics.fmean(ablation.rows[REFERENCE, 16]["nll"]))
    print(f"Dense {dense:.3f}; {len(windows)} windows of {CONTEXT} tokens; {hardware_line(hardware())};", end=" ")
    print(f"commit {ablation.settings['commit']}; {time.strftime('%Y-%m-%d')}.")


if __name__ == "__main__":
    main()
