"""One row says all that is known of a codec: what reads it, and that a codec of the tests needs nothing else."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cache.codecs import CODECS, DENSE, load
from quire.cache.codecs.sums import SumsCodec
from quire.cli import main
from quire.config import CacheConfig, EngineConfig
from quire.engine.build import resolve
from quire.errors import ConfigError
from quire.evaluation import perplexity
from quire.kernels.build import SOURCE_FLAGS
from quire.kernels.runtime import DTYPE_IDS
from quire.options import settings_of
from tests.codecs import ENCODING, TOY, build
from tests.tiny_models import save_tiny, tiny_shape

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src/quire/kernels"
SHAPE = (1, 1, 16)


@pytest.mark.parametrize("name", CODECS)
def test_what_a_row_names_exists(name: str) -> None:
    row = CODECS[name]
    assert bool(row.place) == (name != DENSE)
    for place in filter(None, (row.place, *row.cases.values())):
        assert callable(load(place)), place
    if row.place:
        assert build(name, SHAPE).name == name


def kinds_in_kernels() -> dict[str, int]:
    """The kinds of pages in kernels/common.h, by name."""
    words = re.search(r"enum Kind : uint8_t \{(.*?)\}", (KERNELS / "common.h").read_text())
    assert words is not None
    return {name.strip(): int(number) for name, number in (each.split("=") for each in words[1].split(","))}


def test_pages_of_every_kind_have_an_id_of_their_own() -> None:
    """The one that the kernels know them by."""
    kinds = {*kinds_in_kernels().values()}
    encoding = {build(name, SHAPE).kernel_id for name in ENCODING}
    assert kinds == {*DTYPE_IDS.values(), *encoding, SumsCodec.kernel_id}
    assert len(encoding) == len({CODECS[name].place for name in ENCODING})
    assert build(TOY.name, SHAPE).kernel_id not in kinds


def test_both_kinds_of_kernels_have_the_same_ids() -> None:
    tiles = (ROOT / "src/quire/attention/kernels/tiles.py").read_text()
    ids = {name: int(number) for name, number in re.findall(r"^(\w+): .* = tl\.constexpr\((\d+)\)$", tiles, re.M)}
    kinds = kinds_in_kernels()
    assert ids == {name: kinds.get(name) for name in ids}
    assert {*ids.values()} == {build(name, SHAPE).kernel_id for name in ENCODING if "triton" in CODECS[name].cases}


def test_the_kernels_of_codecs_fuse_no_products() -> None:
    """A fused multiply-add gives other bits than the codec's definition; in most pages none of them shows."""
    called = {*re.findall(r"return ((?:en|de)code_\w+)\(", (KERNELS / "codecs.h").read_text())}
    sources = {
        path.name: {*re.findall(r"^(?:template .*)?void (\w+)\(", path.read_text(), re.M)}
        for path in KERNELS.glob("*.cpp")
    }
    assert called and called <= set().union(*sources.values())
    codecs = {name for name, functions in sources.items() if functions & called}
    assert codecs == SOURCE_FLAGS.keys() and {*SOURCE_FLAGS.values()} == {("-ffp-contract=off",)}


def python_files() -> Iterator[tuple[str, ast.Module]]:
    """Those that may know of codecs, but for the codecs themselves: models lie below, and have weights of g4."""
    root = ROOT / "src/quire"
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("cache/codecs/", "models/")):
            yield name, ast.parse(path.read_text())


def asks_for_a_codec(node: ast.AST) -> bool:
    """Whether code compares something to a codec's name, the beginning of one, or a codec's class."""
    text = ast.unparse(node)
    if isinstance(node, ast.Compare):
        constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        return "weights" not in text and any(value in CODECS for value in constants)
    if isinstance(node, ast.MatchValue):
        return text.strip("'") in CODECS
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        classes = "|".join({row.place.rpartition(":")[2] for row in CODECS.values()} - {""})
        starts = name.endswith(("startswith", "removeprefix")) and re.search(r"'(nuq|g\d)", text) is not None
        return starts or (name == "isinstance" and re.search(rf"\b({classes}|DenseCodec)\b", text) is not None)
    return False


def test_nobody_else_asks_which_codec_there_is() -> None:
    """A question that is asked of a row is answered for codecs to come."""
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in python_files()
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.pattern) and asks_for_a_codec(node)
    ]
    assert not found


@pytest.mark.parametrize(
    "asking",
    ["x.codec == 'g4'", "codec in ('dense', 'nuq3')", "name.startswith('nuq')", "isinstance(codec, (int, GroupCodec))"],
)
def test_such_a_question_is_found(asking: str) -> None:
    assert asks_for_a_codec(ast.parse(asking, mode="eval").body)


def test_only_cases_of_a_codec_know_it() -> None:
    """Its own file is imported by the functions that its row names, by the kernels' launches and by calibration."""
    codecs = {row.place.partition(":")[0] for row in CODECS.values() if row.place}
    cases = {place.partition(":")[0] for row in CODECS.values() for place in row.cases.values()}
    known = {f"{case.removeprefix('quire.').replace('.', '/')}.py" for case in cases}
    known |= {"attention/triton_plan.py", "engine/calibration.py"}
    importing = {
        name
        for name, tree in python_files()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and codecs & {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    }
    assert {name for name in importing if not name.startswith("calibrate/")} == known


def test_the_docs_have_every_codec() -> None:
    codecs, pages = ((ROOT / "docs" / "reference" / page).read_text() for page in ("codecs.md", "page-format.md"))
    for name, row in CODECS.items():
        assert re.search(rf"^\|.*`{name}`", pages, re.MULTILINE), f"page-format.md has no row for {name}"
        sizes = f"multiples of {row.head_dims.step} up to {row.head_dims[-1]}" if row.place else "any"
        yes = ["no", "yes"]
        facts = yes[row.is_calibrated], sizes, yes[row.has_sinks], ", ".join(row.cases) if row.place else "all"
        line = f"| `{name}` | {row.bits} | {' | '.join(facts)} |"
        assert line in codecs, f"docs/reference/codecs.md lacks {line}"


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig.from_options({"cache.codec": TOY.name, "runtime.device": "cpu", **options})


def test_a_codec_without_a_row_is_no_setting() -> None:
    *names, last = CODECS
    with pytest.raises(ConfigError, match=f"cache.codec is 'byte'; it must be {', '.join(names)} or {last}"):
        config_of()


@pytest.mark.usefixtures("toy_codec")
class TestToy:
    """A codec of which `src/` knows nothing."""

    def test_is_a_setting_with_a_sentence(self) -> None:
        assert config_of().cache.codec == "byte" and not config_of().cache.is_calibrated
        (codec,) = (each for each in settings_of(CacheConfig) if each.key == "cache.codec")
        assert codec.doc.endswith(" byte: a byte a number and a scale a vector, without calibration.")

    @pytest.mark.parametrize(("head_dim", "nearest"), [(16, "nuq4"), (12, "g4"), (512, "g4"), (514, "dense")])
    def test_is_refused_by_a_backend_without_a_case(self, head_dim: int, nearest: str) -> None:
        for name in CODECS.keys() - {DENSE, "nuq4", "g4"}:
            del CODECS[name]
        CODECS[TOY.name] = dataclasses.replace(TOY, head_dims=range(2, 999, 2))
        said = (
            "attention.backend cpu has no kernels for cache.codec byte; use attention.backend reference, or"
            f" cache.codec {nearest}"
        )
        for backend in ("cpu", "auto"):
            with pytest.raises(ConfigError, match=said):
                resolve(config_of(**{"attention.backend": backend}), tiny_shape(head_dim=head_dim))

    def test_is_refused_for_heads_that_it_cannot_store(self) -> None:
        said = "byte stores heads whose size is a multiple of 2 up to 256, not 514; use cache.codec dense"
        with pytest.raises(ConfigError, match=said):
            resolve(config_of(**{"attention.backend": "reference"}), tiny_shape(head_dim=514))

    def test_is_loaded_checked_inspected_and_evaluated(self, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / "cache" / "models")
        folder = str(save_tiny(tmp_path / "model"))
        options = {
            "cache.codec": "byte",
            "attention.backend": "reference",
            "cache.memory": "8MiB",
            "runtime.threads": 1,
        }
        with LLM(folder, options) as llm:
            assert llm.generate("a" * 100, SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        assert main(["inspect", folder, *words]) == 0
        assert "codec byte" in capsys.readouterr().out
        config = EngineConfig.from_options(options)
        (found,) = perplexity(folder, "some text " * 30, config=config, context=128, kl=False)
        assert found.codec == "byte" and found.bits_per_element == pytest.approx(8 + 16 / 12, abs=0.1)
