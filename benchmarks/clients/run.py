"""Runs real, unmodified clients against `quire serve MODEL`. scripts/clients.sh installs them and runs this.

    python benchmarks/clients/run.py [--model NAME|FILE ...] [--only openai,...] [--folder DIR] [--logs DIR]

openai     the package: chat, completions, streams, logprobs, n, errors, forms, tools, responses, embeddings, closing
           (check_openai.py)
instructor, langchain, llamaindex
           classes as answers, tools, streams, both endpoints of chats, embeddings (check_frameworks.py)
litellm, pydantic-ai
           the same, and what each sends back of calls and their results (check_agents.py)
ai-sdk     the Vercel AI SDK: text, tools, loops of tools, objects with z.record (check_ai_sdk.mjs); left out without
           Node.js
lm-eval    three small tasks over token-id prompts (tasks/): choices scored with echo and logprobs; whole texts; greedy
           answers, also over chat. Its results must equal those that `quire.LLM` computes here from the same questions
guidellm   a short benchmark each of completions and chat: every request succeeds, with the requested number of tokens
vllm       the same with `vllm bench serve`; left out if vLLM is not installed

Prints client, check and result for each model. The exit status is 1 if anything failed. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common import ROOT  # noqa: E402
from servers import quire_server  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402
from quire.models.embedded import cached_path  # noqa: E402
from quire.models.gguf_file import read_header  # noqa: E402
from quire.models.vocabulary import from_gguf  # noqa: E402

EMBEDDED = "smollm2"
# Clients whose checks are a script: its environment in .peers, and its file.
CHECKED = {
    "openai": ("agents", "check_openai.py"),
    "litellm": ("agents", "check_agents.py"),
    "pydantic-ai": ("agents", "check_agents.py"),
    "instructor": ("frameworks", "check_frameworks.py"),
    "langchain": ("frameworks", "check_frameworks.py"),
    "llamaindex": ("frameworks", "check_frameworks.py"),
}
EVERY = (*CHECKED, "ai-sdk", "lm-eval", "guidellm", "vllm")
TASKS = HERE / "tasks"
# A 1.5B model on a busy machine of two cores decodes a few tokens per second.
CLIENT_SECONDS = 1800
OPTIONS = {"cache.memory": "512MiB"}
# Both sides run one request at a time: in bf16 another batch rounds differently, and greedy texts diverge at near ties.
MAX_DIFFERENCE = 1e-3
# Load of the benchmarks.
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 48, 8

Row = tuple[str, str, str, bool]
"""Client, check, result, whether it passed."""


class ClientError(Exception):
    """A client failed. The message names it and its log in one line."""


def run_client(command: Sequence[object], log: Path, environment: Mapping[str, str], folder: Path = ROOT) -> str:
    """Runs a client. Returns its standard output, which is also written to `log`. Raises ClientError."""
    words = [str(word) for word in command]
    with log.open("w") as errors:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=CLIENT_SECONDS,
        )
    with log.open("a") as file:
        file.write(done.stdout)
    if done.returncode:
        raise ClientError(f"exit code {done.returncode}, see {log}")
    return done.stdout


@contextmanager
def server(model: str, log: Path) -> Iterator[str]:
    """The address of a server in its own process. At the end it is drained and must exit with code 0."""
    options = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    with quire_server(log, model, *options) as found:
        yield found.url
        found.drain()


def save_tokenizer(model: str, folder: Path) -> None:
    """Saves a model's tokenizer for `transformers`, for clients that count or make tokens. Raises ClientError."""
    path = cached_path() if model == EMBEDDED else Path(model)
    if path is None:
        raise ClientError("the embedded model is not there: quire pull smollm2")
    if path.suffix != ".gguf":
        raise ClientError(
            f"lm-eval, guidellm and vllm need a GGUF file's tokenizer, not {path}: choose others with --only"
        )
    metadata = read_header(path).metadata
    folder.mkdir(parents=True, exist_ok=True)
    from_gguf(metadata, path).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {f"{role}_token": tokens[metadata[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])
    # transformers reads only the kind of model, to choose a class of tokenizer.
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192}))


class Clients:
    """The clients, each a method that runs it against the server and returns rows."""

    def __init__(self, model: str, folder: Path, logs: Path, url: str) -> None:
        self.model, self.folder, self.logs, self.url = model, folder, logs, url
        self.bin = folder / "clients/bin"
        self.tokenizer = logs / "tokenizer"
        self.environment = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(logs / "huggingface"),
            "OPENAI_API_KEY": "none",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def run(self, name: str) -> list[Row]:
        """Runs one of EVERY."""
        if name in CHECKED:
            environment, script = CHECKED[name]
            words = [] if name == "openai" else [name]
            return self._checked(name, [self.folder / environment / "bin/python", HERE / script, *words])
        match name:
            case "ai-sdk":
                return self.ai_sdk()
            case "lm-eval":
                return self.lm_eval()
            case "guidellm":
                return self.guidellm()
            case "vllm":
                return self.vllm_bench()
        raise ValueError(name)

    def ai_sdk(self) -> list[Row]:
        """The Vercel AI SDK's checks, one row each."""
        modules = self.folder / "ai-sdk"
        if shutil.which("node") is None or not (modules / "node_modules").is_dir():
            return [("ai-sdk", "-", "left out: node or npm is missing", True)]
        return self._checked("ai-sdk", ["node", HERE / "check_ai_sdk.mjs", modules])

    def _checked(self, name: str, command: Sequence[object]) -> list[Row]:
        """Runs a script that prints its checks, with the address of the API as its last argument."""
        log = self.logs / f"{name}.log"
        ended: ClientError | None = None
        try:
            output = run_client([*command, f"{self.url}/v1"], log, self.environment)
        except ClientError as error:
            ended, output = error, log.read_text()
        rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"what"')]
        if not rows or (ended is not None and all(row["ok"] for row in rows)):
            raise ended or ClientError(f"no check ran, see {log}")
        return [(name, row["what"], row["result"], row["ok"]) for row in rows]

    def lm_eval(self) -> list[Row]:
        """Runs the tasks. `compare_with_library` judges the results."""
        by_ids = {
            "tokenizer": self.tokenizer,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "max_length": 2048,
        }
        tasks = "quire_choices,quire_texts,quire_answers"
        self._lm_eval("lm_eval", "local-completions", "/v1/completions", tasks, by_ids)
        self._lm_eval("lm_eval_chat", "local-chat-completions", "/v1/chat/completions", "quire_answers", {})
        return []

    def _lm_eval(self, name: str, kind: str, endpoint: str, tasks: str, more: Mapping[str, object]) -> None:
        arguments = {
            "model": self.model,
            "base_url": self.url + endpoint,
            "num_concurrent": 1,
            "max_retries": 1,
            **more,
        }
        command = [
            self.bin / "lm_eval", "run", "--model", kind,
            "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
            "--include_path", TASKS, "--tasks", tasks, "--output_path", self.logs / name, "--log_samples",
            *([] if more else ["--apply_chat_template"]),
        ]  # fmt: skip
        # The tasks name their questions relative to their folder.
        run_client(command, self.logs / f"{name}.log", self.environment, TASKS)

    def guidellm(self) -> list[Row]:
        """Both endpoints, a few requests each."""
        return [self._guidellm(endpoint) for endpoint in ("/v1/completions", "/v1/chat/completions")]

    def _guidellm(self, endpoint: str) -> Row:
        name = f"guidellm{endpoint.replace('/', '_')}"
        result = self.logs / f"{name}.json"
        command = [
            self.bin / "guidellm", "run",
            "--backend", f"kind=openai_http,target={self.url},model={self.model},request_format={endpoint}",
            "--profile", "kind=concurrent,streams=3",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={self.tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output", f"kind=json,path={result}", "--disable-progress",
        ]  # fmt: skip
        run_client(command, self.logs / f"{name}.log", self.environment)
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
        requests = benchmark["requests"]
        tokens = [request["output_tokens"] for request in requests["successful"]]
        failed = len(requests["errored"]) + len(requests["incomplete"])
        ok = not failed and tokens == [OUTPUT_TOKENS] * REQUESTS
        ok &= _counts_prompts(endpoint, [request["prompt_tokens"] for request in requests["successful"]])
        return "guidellm", endpoint, f"{len(tokens)} requests, {sum(tokens)} tokens, {failed} failed", ok

    def vllm_bench(self) -> list[Row]:
        """Both endpoints, a few requests each."""
        if not (self.folder / "vllm/bin/vllm").exists():
            return [("vllm bench serve", "-", "left out: scripts/peers.sh installs it", True)]
        return [
            self._vllm_bench("openai", "/v1/completions"),
            self._vllm_bench("openai-chat", "/v1/chat/completions"),
        ]

    def _vllm_bench(self, backend: str, endpoint: str) -> Row:
        result = self.logs / f"vllm_{backend}.json"
        command = [
            self.folder / "vllm/bin/vllm", "bench", "serve", "--backend", backend, "--base-url", self.url,
            "--endpoint", endpoint, "--model", self.model, "--tokenizer", self.tokenizer, "--dataset-name", "random",
            "--random-input-len", PROMPT_TOKENS, "--random-output-len", OUTPUT_TOKENS, "--num-prompts", REQUESTS,
            "--max-concurrency", 3, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed",
            "--result-dir", result.parent, "--result-filename", result.name,
        ]  # fmt: skip
        run_client(command, self.logs / f"vllm_{backend}.log", self.environment)
        found = json.loads(result.read_text())
        tokens, failed = found["output_lens"], REQUESTS - found["completed"]
        ok = not failed and tokens == [OUTPUT_TOKENS] * REQUESTS and not any(found["errors"])
        ok &= _counts_prompts(endpoint, found["input_lens"])
        return "vllm bench serve", endpoint, f"{found['completed']} requests, {sum(tokens)} tokens, {failed} failed", ok


def _counts_prompts(endpoint: str, tokens: list[int]) -> bool:
    """Whether the server counted the client's tokens. In a chat, the template adds the same number to each prompt."""
    wanted = PROMPT_TOKENS if endpoint == "/v1/completions" else max(tokens)
    return tokens == [wanted] * REQUESTS and wanted >= PROMPT_TOKENS


def server_rows(url: str, log: Path) -> list[Row]:
    """The server's own report about the run."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    counts: dict[str, int] = {}
    for line in lines:
        if line.startswith("quire_http_responses_total{"):
            status = line.partition('status="')[2].partition('"')[0]
            counts[status] = counts.get(status, 0) + int(float(line.split()[-1]))
    running = [line for line in lines if line.startswith(("quire_requests_running ", "quire_requests_waiting "))]
    idle = all(float(line.split()[-1]) == 0 for line in running)
    text = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    clean = not any(status.startswith("5") for status in counts) and "Traceback" not in log.read_text()
    return [("server", "responses", text, clean), ("server", "requests left", "none" if idle else str(running), idle)]


def compare_with_library(model: str, logs: Path) -> list[Row]:
    """Compares lm-eval's reports with the library's own probabilities and answers for the same questions."""
    questions = [json.loads(line) for line in (TASKS / "questions.jsonl").read_text().splitlines()]
    with LLM(model, options=OPTIONS) as llm:
        return [
            _compare_choices(llm, questions, logs),
            _compare_texts(llm, questions, logs),
            _compare_answers(llm, questions, logs, chat=False),
            _compare_answers(llm, questions, logs, chat=True),
        ]


def _compare_choices(llm: LLM, questions: list[dict], logs: Path) -> Row:
    samples, report = _lm_eval_results(logs, "quire_choices")
    worst, hits, hits_norm, same_greedy = 0.0, 0, 0, True
    for question, sample in zip(questions, samples, strict=True):
        context = _context(question)
        scores = []
        for choice, reply in zip(question["choices"], sample["filtered_resps"], strict=True):
            whole = llm.tokenizer.encode(f"{context} {choice}", add_special=False)
            score, greedy = _score(llm, whole, len(llm.tokenizer.encode(context, add_special=False)))
            scores.append(score)
            worst = max(worst, abs(score - float(reply[0])))
            same_greedy &= greedy == _truth(reply[1])
        by_character = [score / len(choice) for score, choice in zip(scores, question["choices"], strict=True)]
        hits += scores.index(max(scores)) == question["answer"]
        hits_norm += by_character.index(max(by_character)) == question["answer"]
    ours = hits / len(questions), hits_norm / len(questions)
    theirs = report["acc,none"], report["acc_norm,none"]
    agrees = all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(ours, theirs, strict=True))
    text = (
        f"acc {theirs[0]:.3f}, ours {ours[0]:.3f}; acc_norm {theirs[1]:.3f}, ours {ours[1]:.3f}; "
        f"log-probabilities within {worst:.1g}"
    )
    return "lm-eval", "multiple_choice", text, agrees and same_greedy and worst <= MAX_DIFFERENCE


def _compare_texts(llm: LLM, questions: list[dict], logs: Path) -> Row:
    samples, report = _lm_eval_results(logs, "quire_texts")
    worst, total, size = 0.0, 0.0, 0
    for question, sample in zip(questions, samples, strict=True):
        text = question["question"]
        # The first token is predicted from the begin token.
        whole = [llm.tokenizer.bos_id, *llm.tokenizer.encode(text, add_special=False)]
        score, _ = _score(llm, whole, 1)
        worst = max(worst, abs(score - float(sample["filtered_resps"][0])))
        total, size = total + score, size + len(text.encode())
    bits = -total / size / math.log(2)
    theirs = report["bits_per_byte,none"]
    text = f"bits per byte {theirs:.4f}, ours {bits:.4f}; log-probabilities within {worst:.1g}"
    return "lm-eval", "loglikelihood_rolling", text, worst <= MAX_DIFFERENCE and abs(bits - theirs) < 0.01


def _compare_answers(llm: LLM, questions: list[dict], logs: Path, chat: bool) -> Row:
    samples, _ = _lm_eval_results(logs, "quire_answers", "lm_eval_chat" if chat else "lm_eval")
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n", "Question:"])
    same, written = 0, 0
    for question, sample in zip(questions, samples, strict=True):
        if chat:
            (output,) = llm.chat([{"role": "user", "content": _context(question)}], params)
        else:
            ids = llm.tokenizer.encode(_context(question), add_special=False)
            (output,) = llm.generate({"prompt_token_ids": ids}, params)
        text = output.outputs[0].text
        same, written = same + (text == sample["resps"][0][0]), written + bool(text.strip())
    # Some questions this model leaves unanswered.
    ok = same == len(questions) and written >= 2
    what = "generate_until, chat" if chat else "generate_until"
    return "lm-eval", what, f"{same} of {len(questions)} answers the same, {written} not empty", ok


def _context(question: dict) -> str:
    """The context of a question, as the tasks write it."""
    return f"Question: {question['question']}\nAnswer:"


def _score(llm: LLM, ids: list[int], begin: int) -> tuple[float, bool]:
    """Log-probability of ids[begin:] after ids[:begin], and whether each of them is the most probable."""
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    score, greedy = 0.0, True
    for token, position in zip(ids[begin:], output.prompt_logprobs[begin:], strict=True):
        assert position is not None
        score += position[token].logprob
        greedy &= position[token].logprob == max(entry.logprob for entry in position.values())
    return score, greedy


def _truth(value: object) -> bool:
    """A truth value that lm-eval wrote as text."""
    return value is True or value == "True"


def _lm_eval_results(logs: Path, task: str, run: str = "lm_eval") -> tuple[list[dict], dict]:
    """(samples in the order of the questions, metrics) of a task."""
    (folder,) = {path.parent for path in (logs / run).rglob("results_*.json")}
    (report,) = folder.glob("results_*.json")
    (samples,) = folder.glob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["doc_id"]), json.loads(report.read_text())["results"][task]


def run_model(model: str, only: Sequence[str], folder: Path, logs: Path) -> list[Row]:
    """Starts the server, runs the clients in turn, stops it, compares."""
    rows: list[Row] = []

    def attempt(client: str, work: Callable[[], list[Row]]) -> None:
        begun = time.monotonic()
        try:
            rows.extend(work())
        except Exception as error:
            rows.append((client, "-", f"{type(error).__name__}: {error}".replace("\n", " ")[:300], False))
        print(f"{client}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    def with_server() -> list[Row]:
        if {"lm-eval", "guidellm", "vllm"} & set(only):
            save_tokenizer(model, logs / "tokenizer")
        with server(model, logs / "server.log") as url:
            clients = Clients(model, folder, logs, url)
            for name in only:
                attempt(name, functools.partial(clients.run, name))
            rows.extend(server_rows(url, logs / "server.log"))
        return [("server", "drain", "exit code 0", True)]

    attempt("server", with_server)
    if "lm-eval" in only and not any(client == "lm-eval" for client, *_ in rows):
        attempt("lm-eval", lambda: compare_with_library(model, logs))
    return rows


def main() -> int:
    """Runs the clients against each model, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"what `quire serve` takes; again for more ({EMBEDDED})")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="the clients' environments")
    parser.add_argument("--logs", type=Path, default=ROOT / ".peers/logs/clients", help="emptied first")
    parser.add_argument("--only", default=",".join(EVERY), help=f"clients, comma-separated ({','.join(EVERY)})")
    args = parser.parse_args()
    only = args.only.split(",")
    if unknown := set(only) - set(EVERY):
        parser.error(f"--only: no client {', '.join(sorted(unknown))}; there are {', '.join(EVERY)}")
    # Ending this script also ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    shutil.rmtree(args.logs, ignore_errors=True)
    ok = True
    for number, model in enumerate(args.model or [EMBEDDED], 1):
        logs = args.logs / f"{number}-{Path(model).stem}"
        logs.mkdir(parents=True)
        rows = run_model(model, only, args.folder, logs)
        print(f"{model}\n\n{_table(rows)}\n", flush=True)
        ok &= bool(rows) and all(row[3] for row in rows)
    return 0 if ok else 1


def _table(rows: Sequence[Row]) -> str:
    """A table with all columns left-aligned."""
    lines = [("client", "what", "result", ""), *((*row[:3], "ok" if row[3] else "FAILED") for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
