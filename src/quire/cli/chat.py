"""Talk with a model in the terminal.

The answer streams as it is made; Ctrl-C stops it and keeps what there is. A line that ends with a backslash goes on in
the next one. Commands: /reset  /system TEXT  /save FILE  /help  /exit. Without a terminal every line of the input is a
message and the answers are printed plainly.

What the sampling flags leave out is taken from the model, where its makers advise something; else the temperature is
0.7 and top_p is 0.95. An answer ends after 1,024 tokens unless --max-tokens says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.errors import ModelError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from quire.async_llm import AsyncLLM
    from quire.engine.params import SamplingParams

HELP = "talk with a model in the terminal"

MAX_TOKENS = 1024
"""Of an answer, unless told: a small model that repeats itself would fill the context, for minutes."""

SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""For models whose makers advise nothing."""

COMMANDS = """\
/reset         forget the conversation
/system TEXT   set the system prompt, and forget the conversation
/save FILE     write the conversation as a line of JSON that `quire generate --input` takes
/help          show this
/exit          leave (also /quit, Ctrl-D)
A line that ends with a backslash goes on in the next one. Ctrl-C stops an answer."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    shared.add_sampling_flags(parser, {"max_tokens": MAX_TOKENS})


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    if shared.printed_config(args):
        return 0
    given = shared.sampling_from(args)
    shared.sampling_params(given)  # what is wrong with the flags is told before a model is loaded
    terminal = Terminal(sys.stdin.isatty() and sys.stdout.isatty())
    with shared.runner() as loop:
        context = shared.engine(args)
        with terminal.busy(f"loading {args.model}"):
            llm = loop.run(context.__aenter__())
        try:
            params = shared.sampling_params(dict(llm.sampling_defaults.values or SAMPLING) | given)
            terminal.note(f"{llm.model_name}, context {llm.max_context:,} tokens; /help shows the commands")
            talk(
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
        """The messages as chat templates take them."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


def talk(terminal: Terminal, conversation: Conversation, ask: Any) -> None:
    """Read messages and commands until the input ends. `ask` streams the answer to messages and returns its text; a
    message whose answer raises RequestError or ModelError is told why and leaves no turn.
    """
    while (text := terminal.read()) is not None:
        if not text.strip():
            continue
        if text.startswith("/"):
            if not obey(terminal, conversation, text):
                return
            continue
        conversation.turns.append({"role": "user", "content": text})
        try:
            reply = ask(conversation.messages)
        except (RequestError, ModelError) as error:
            conversation.turns.pop()
            hint = "; /reset starts anew" if conversation.turns else ""
            terminal.note(f"{error}{hint}")
            continue
        conversation.turns.append({"role": "assistant", "content": reply})


def obey(terminal: Terminal, conversation: Conversation, text: str) -> bool:
    """Carry out a command; whether to go on."""
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
            terminal.note(COMMANDS if command == "/help" else f"there is no command {command}\n{COMMANDS}")
    return True


def save(conversation: Conversation, name: str) -> str:
    """Write the conversation as one line of JSON; returns what to tell."""
    if not name:
        return "/save needs the name of a file"
    try:
        line = json.dumps({"messages": conversation.messages}, ensure_ascii=False)
        Path(name).expanduser().write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        return f"cannot write {name}: {error.strerror or error}"
    return f"{len(conversation.messages)} messages are in {name}"


async def answer(llm: AsyncLLM, messages: list[dict[str, str]], params: SamplingParams, terminal: Terminal) -> str:
    """Stream the answer to `messages` to the terminal; returns its text, or what there is of it when stopped.

    Raises ModelError if the answer ends because the model's numbers are not finite.
    """
    import asyncio

    rendered = llm.tokenizer.chat(messages, add_generation_prompt=True)
    prompt = {"prompt_token_ids": llm.tokenizer.encode(rendered, add_special=False)}
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
        # Ctrl-C: the answer ends here, the chat goes on.
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
    """Where the chat happens: with colours and line editing on a terminal, plain lines otherwise."""

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive
        self.console: Console | None = None
        if interactive:
            import readline  # noqa: F401  (input() edits lines with it)

            from rich.console import Console

            self.console = Console(highlight=False)

    def busy(self, what: str) -> Any:
        """A context in which a spinner turns."""
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
                # Ctrl-C while typing drops the line, as shells do.
                print()
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def write(self, text: str) -> None:
        """A piece of the answer."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self, summary: str) -> None:
        """The end of an answer, with its numbers where somebody looks."""
        sys.stdout.write("\n")
        if self.console is not None:
            self.console.print(summary, style="dim", markup=False)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Something that is no answer: dim on a terminal, on stderr otherwise."""
        if self.console is not None:
            self.console.print(text, style="dim", markup=False)
        else:
            print(text, file=sys.stderr)
