"""Chat with a model in the terminal.

Answers stream. Ctrl-C stops an answer and keeps its text so far. A backslash at the end of a line continues the message
on the next line. Commands: /reset  /system TEXT  /save FILE  /help  /exit. Without a terminal every input line is a
message, answers are printed as plain text, and Ctrl-C ends the chat.

Sampling parameters that are not given as flags come from the model, if its authors recommend values. Otherwise the
temperature is 0.7 and top_p is 0.95. An answer has at most 1,024 tokens, or --max-tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import check_open, shared
from quire.errors import ConfigError, ModelError, RequestError
from quire.folders import user_path

if TYPE_CHECKING:
    from rich.console import Console

    from quire.async_llm import AsyncLLM
    from quire.engine.params import SamplingParams

MAX_TOKENS = 1024
"""Default limit of an answer. Without it, a small model that repeats itself would fill the context for minutes."""

SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Defaults for models without recommended values."""

COMMANDS = """\
/reset         forget the conversation
/system TEXT   set the system prompt, and forget the conversation
/save FILE     write the conversation as a line of JSON for `quire generate --input`
/help          show this help
/exit          leave (also /quit, Ctrl-D)
A backslash at the end of a line continues the message on the next line. Ctrl-C stops an answer or discards the line."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    shared.add_sampling_flags(parser, {"max_tokens": MAX_TOKENS})


def run(args: argparse.Namespace) -> int:
    """Runs the chat until the input ends."""
    if shared.printed_config(args):
        return 0
    given = shared.sampling_from(args)
    shared.sampling_params(given)  # reports invalid flags before the model is loaded
    check_open("stdin")
    terminal = Terminal(sys.stdin.isatty() and sys.stdout.isatty())
    with shared.runner() as loop:
        context = shared.engine(args)
        with terminal.busy(f"loading {args.model}"):
            llm = loop.run(context.__aenter__())
        try:
            params = shared.sampling_params(dict(llm.sampling_defaults.values or SAMPLING) | given)
            terminal.note(f"{llm.model_name}, context {llm.max_context:,} tokens; /help shows the commands")
            chat_loop(
                terminal, Conversation(args.system), lambda messages: loop.run(answer(llm, messages, params, terminal))
            )
        finally:
            loop.run(context.__aexit__(None, None, None))
    return 0


@dataclass
class Conversation:
    """The messages so far."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages in the form of chat templates."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


def chat_loop(terminal: Terminal, conversation: Conversation, ask: Any) -> None:
    """Reads messages and commands until the input ends.

    ask  streams the answer to messages and returns its text. If it raises RequestError or ModelError, the chat shows
         the error and drops the message.
    """
    while (text := terminal.read()) is not None:
        if not text.strip():
            continue
        if text.startswith("/"):
            if not run_command(terminal, conversation, text):
                return
            continue
        conversation.turns.append({"role": "user", "content": text})
        try:
            reply = ask(conversation.messages)
        except (RequestError, ModelError) as error:
            conversation.turns.pop()
            hint = "; /reset starts a new conversation" if conversation.turns else ""
            terminal.note(f"{error}{hint}")
            continue
        conversation.turns.append({"role": "assistant", "content": reply})


def run_command(terminal: Terminal, conversation: Conversation, text: str) -> bool:
    """Executes a command. Returns whether the chat continues."""
    command, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    match command:
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.turns.clear()
            terminal.note("the conversation is forgotten")
        case "/system":
            conversation.system = rest or None
            conversation.turns.clear()
            terminal.note("a new conversation, " + (f"system prompt: {rest}" if rest else "without a system prompt"))
        case "/save":
            terminal.note(save(conversation, rest))
        case _:
            terminal.note(COMMANDS if command == "/help" else f"unknown command {command}\n{COMMANDS}")
    return True


def save(conversation: Conversation, name: str) -> str:
    """Writes the conversation as one line of JSON. Returns a message for the user."""
    if not name:
        return "/save needs a file name"
    if not conversation.messages:
        return "there are no messages to save"
    try:
        line = json.dumps({"messages": conversation.messages}, ensure_ascii=False)
        user_path(name).write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        return f"cannot write {name}: {error.strerror or error}"
    except ConfigError as error:
        return f"cannot write {error}"
    return f"saved {len(conversation.messages)} messages to {name}"


async def answer(llm: AsyncLLM, messages: list[dict[str, str]], params: SamplingParams, terminal: Terminal) -> str:
    """Streams the answer to `messages`. Returns its text, or on a terminal the text so far after Ctrl-C.

    Raises ModelError if the model's logits are not finite.
    """
    import asyncio

    prompt = {"prompt_token_ids": llm.tokenizer.chat_ids(messages)}
    text, num_tokens, begun, first = "", 0, time.monotonic(), 0.0
    stream = llm.generate(prompt, params)
    try:
        async for item in stream:
            first = first or time.monotonic()
            for output in item.outputs:
                num_tokens += len(output.token_ids)
                text += output.text
                terminal.write(output.text)
                if output.finish_reason == "error":
                    if text:
                        terminal.write("\n")
                    raise ModelError(f"the answer failed: {output.stop_reason}")
    except asyncio.CancelledError:
        if not terminal.interactive:
            raise
        # Ctrl-C ends the answer; the chat continues.
        terminal.write(" …")
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    finally:
        await stream.aclose()
    seconds = time.monotonic() - first
    speed = f"{(num_tokens - 1) / seconds:.0f} tokens/s, " if num_tokens > 1 and seconds > 0 else ""
    terminal.end(f"{num_tokens} tokens, {speed}first after {(first or time.monotonic()) - begun:.2f} s")
    return text


class Terminal:
    """Input and output of the chat: colours and line editing on a terminal, plain lines otherwise."""

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive
        self.console: Console | None = None
        if interactive:
            import readline  # noqa: F401  (input() edits lines with it)

            from rich.console import Console

            self.console = Console(highlight=False)

    def busy(self, what: str) -> Any:
        """A context manager that shows a spinner."""
        from contextlib import nullcontext

        return self.console.status(what) if self.console is not None else nullcontext()

    def read(self) -> str | None:
        """The next message, or None at the end."""
        lines: list[str] = []
        prompt = "\001\033[1;36m\002>\001\033[0m\002 " if self.interactive else ""
        while True:
            try:
                line = input(prompt)
            except EOFError:
                if self.interactive:
                    print()
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                # Ctrl-C while typing discards the line, as in shells.
                print()
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def write(self, text: str) -> None:
        """Writes a piece of the answer."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self, summary: str) -> None:
        """Ends an answer; on a terminal with its statistics."""
        sys.stdout.write("\n")
        if self.console is not None:
            self.console.print(summary, style="dim", markup=False)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Shows a message that is not part of an answer: dim on a terminal, otherwise on stderr."""
        if self.console is not None:
            self.console.print(text, style="dim", markup=False)
        else:
            print(text, file=sys.stderr)
