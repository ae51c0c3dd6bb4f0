"""`swarm chat`: a conversation in the terminal, or line by line from a pipe. One session stays open for all of it.

The main thread reads and prints; the session lives on a thread of its own, so that its links stay alive while somebody
thinks about what to say next.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path

from routing.errors import BadInput, NoRoute, Overloaded, PromptTooLong, SwarmError, TimedOut
from swarm.commands.asking import Answer, Asking
from swarm.figures import hop_times
from swarm.generation import Token
from swarm.render import route_table
from swarm.sync import Chat, SwarmModel
from swarm.terminal import Console, tell

NEW_TOKENS = 512
PROMPT = "> "
HELP = """/route  the peers that answer, and what each takes of a token
/reset  begin a new conversation
/exit   leave (so do Ctrl-D, and Ctrl-C twice)
Ctrl-C stops an answer; everything else is said to the model."""
GOES_ON = (BadInput, PromptTooLong, NoRoute, TimedOut, Overloaded)  # the session can still be used after these


class Conversation:
    """What the loop of `chat` works on."""

    def __init__(self, console: Console, asking: Asking, model: SwarmModel, path: Path | None = None):
        """`path`: of the file that keeps the conversation; what is in there goes on."""
        self.console, self.asking, self.model, self.path = console, asking, model, path
        self.chat: Chat
        if path is not None and path.exists():
            self.chat = model.resume_chat(path)
        else:
            self.begin()

    def begin(self) -> None:
        self.chat = self.model.chat(self.asking.system)

    def reset(self) -> None:
        self.chat.__exit__()
        self.begin()

    def take_up(self) -> None:
        """Show how far the conversation came, and print the rest of an answer that was under way."""
        messages, said = self.chat.messages, self.chat.session.said
        if messages and self.path is not None and self.path.exists():
            self.console.note(f"going on with the {len(messages)} messages of {self.path}")
        if said:
            self.console.stream(messages[-1]["content"])
            rest = self.chat.rest(timeout_s=self.asking.timeout_s, save_to=self.path)
            self._print(rest, len(self.chat.session.token_ids))

    def say(self, text: str) -> None:
        """Print the answer as it comes. Ctrl-C raises KeyboardInterrupt, and what came so far stays said."""
        held = len(self.model.encode([*self.chat.messages, {"role": "user", "content": text}]))
        # In a long conversation the answers get shorter before there is no room at all.
        wish, room = self.asking.max_new_tokens or NEW_TOKENS, self.model.max_context - held
        settings = self.asking.settings(max(1, min(wish, room)))
        self._print(self.chat.send(text, timeout_s=self.asking.timeout_s, save_to=self.path, **settings), held)

    def _print(self, answer: Iterator[Token], held: int) -> None:
        """`held`: tokens of all that goes before the answer."""
        console, session = self.console, self.chat.session
        seen_traces, seen_recoveries = len(session.traces), len(session.recoveries)
        tokens: list[Token] = []
        asked_s = time.monotonic()

        def report() -> None:
            answer = Answer(
                asked_s=asked_s,
                prompt_tokens=held,
                tokens=tokens,
                route=session.route,
                traces=session.traces[seen_traces:],
                recoveries=session.recoveries[seen_recoveries:],
            )
            console.event({"event": "answer", **answer.facts()})
            if any(recovery.before for recovery in answer.recoveries) or answer.finish == "length":
                console.note(answer.summary())

        until_first = ExitStack()
        until_first.enter_context(console.progress("waiting for the answer"))
        try:
            for token in answer:
                until_first.close()
                tokens.append(token)
                console.stream(token.text)
        except KeyboardInterrupt:
            until_first.close()
            console.plain("")
            report()
            raise
        except SwarmError:
            if tokens:
                console.plain("")
            raise
        finally:
            until_first.close()
        console.plain("")
        report()

    def show_route(self) -> None:
        session = self.chat.session
        if session.route is None:
            self.console.note("no route yet: say something first")
        else:
            self.console.show(route_table(hop_times(session.route, session.traces), "milliseconds of a token"))


def chat(console: Console, asking: Asking, path: Path | None = None) -> None:
    """`path`: where the conversation is kept, and taken up if it is there. Raises what `SwarmModel` raises; with
    somebody at the terminal, what can be mended there is only told."""
    asking.check()
    with console.progress(f"opening {asking.model} and joining the swarm") as progress:
        model = SwarmModel.connect(asking.model, **asking.connecting(), progress=progress)
        model.__enter__()
    try:
        if not model.tokenizer.chat_template:
            raise BadInput(
                f"{asking.model} has no chat template, so it cannot chat",
                advice="Use swarm generate, or an instruction-tuned model.",
            )
        conversation = Conversation(console, asking, model, path)
        try:
            _talk(conversation)
        finally:
            conversation.chat.__exit__()
    finally:
        model.__exit__()


def _talk(conversation: Conversation) -> None:
    console = conversation.console
    somebody = sys.stdin.isatty()
    if somebody:
        console.note("Say something. /help tells what else there is; Ctrl-D leaves.")
        with suppress(ImportError):  # editing and history, where the system has it
            import_module("readline")
    stopped = False  # by Ctrl-C; a second one leaves
    begun = False
    while True:
        try:
            if not begun:
                begun = True
                conversation.take_up()
            line = _read(console, somebody)
            if line is None:
                return
            stopped = False
            if not _command(conversation, line):
                return
        except KeyboardInterrupt:
            if stopped or not somebody:
                raise
            stopped = True
            console.note("Ctrl-C once more leaves")
        except GOES_ON as error:
            if not somebody:
                raise
            _tell(console, error)


def _read(console: Console, somebody: bool) -> str | None:
    """The next line, without its end; None when there are no more."""
    if somebody:
        try:
            return input("" if console.as_json or not sys.stdout.isatty() else PROMPT)
        except EOFError:
            console.plain("")
            return None
        except KeyboardInterrupt:
            console.plain("")
            raise
    line = sys.stdin.readline()
    return line if line else None


def _command(conversation: Conversation, line: str) -> bool:
    """Do what a line says; False ends the chat."""
    console, words = conversation.console, line.strip()
    match words:
        case "":
            pass
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.reset()
            console.note("a new conversation")
        case "/route":
            conversation.show_route()
        case "/help" | "/?":
            console.note(HELP, style="")
        case _ if words.startswith("/") and " " not in words and words[1:].isalpha():
            console.note(f"there is no command {words}; /help tells which there are")
        case _:
            conversation.say(words)
    return True


def _tell(console: Console, error: SwarmError) -> None:
    advice = "/reset begins a new conversation." if isinstance(error, PromptTooLong) else error.advice
    tell(console, type(error).__name__, str(error), advice)
