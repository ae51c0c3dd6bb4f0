"""`swarm generate`: one prompt in, the text out as it comes, then how it went."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, ExitStack, aclosing

from routing.errors import BadInput
from swarm.commands.asking import Answer, Asking
from swarm.generation import Token
from swarm.model import SwarmModel
from swarm.render import spans_with
from swarm.terminal import Console
from swarm.timeline import trace_facts
from swarm.trace_table import trace_table

NEW_TOKENS = 256


async def generate(console: Console, asking: Asking, text: str, *, raw: bool, trace: bool = False) -> None:
    """With `trace`, also where the time went. Raises what `SwarmModel` raises."""
    if not text:
        raise BadInput("the prompt is empty", advice="Give some text, or - to read it from standard input.")
    asking.check()
    async with AsyncExitStack() as stack:
        with console.progress(f"opening {asking.model} and joining the swarm") as progress:
            connecting = SwarmModel.connect(asking.model, **asking.connecting(), progress=progress)
            model = await stack.enter_async_context(connecting)
        missing = await _missing(model) if asking.wait_s else ""
        if missing:
            console.note(f"nobody serves blocks {missing}; waiting up to {asking.wait_s:g} s for a peer that does")
        ids = model.encode(text if raw or not model.tokenizer.chat_template else asking.messages(text))
        settings = asking.settings(asking.new_tokens(NEW_TOKENS, model.max_context - len(ids)))
        session = await stack.enter_async_context(model.session())
        tokens: list[Token] = []
        asked_s = time.monotonic()
        until_first = stack.enter_context(ExitStack())
        until_first.enter_context(console.progress(f"waiting for {f'blocks {missing}' if missing else 'the answer'}"))
        try:
            async with aclosing(session.generate(ids, timeout_s=asking.timeout_s, **settings)) as stream:
                async for token in stream:
                    until_first.close()
                    tokens.append(token)
                    console.stream(token.text)
        finally:
            until_first.close()
            if tokens:
                console.plain("")
        answer = Answer(
            asked_s=asked_s,
            prompt_tokens=len(ids),
            tokens=tokens,
            route=session.route,
            traces=session.traces,
            recoveries=session.recoveries,
        )
    console.note(answer.summary())
    facts = answer.facts()
    if trace:
        console.detail(trace_table(answer.traces, answer.recoveries))
        facts["trace"] = trace_facts(answer.traces, answer.recoveries)
    console.event(facts)


async def _missing(model: SwarmModel) -> str:
    """The blocks that nobody serves, as spans."""
    status = await model.status()
    return ", ".join(map(str, spans_with(status.coverage, 0)))
