"""Streaming text equals decoding at once; stop strings do not depend on how the text is cut; chats."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from routing.errors import BadInput
from swarm.checkpoint import open_checkpoint
from swarm.text import MOST_HELD, StopStrings, TextStream, chat_ids, next_turn_ids
from tests.tiny import tiny_tokenizer

BYTES = tiny_tokenizer()  # every byte is a token
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
MIXED = "Zürich – 日本語のテキスト 👩‍👩‍👧 ok\n\n\tif x:\n  \u200b naïve\ufeff 😀😀"


def sentencepiece(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Llama's kind: leading spaces as ▁, unknown bytes as <0xXX>, the decoder strips the first space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


SPACED = sentencepiece(("▁", "▁Once", "▁upon", "a", "▁a", "▁▁", "é", "."))


@pytest.fixture(scope="module")
def smollm():
    return open_checkpoint("smollm2").tokenizer()


def streamed(tokenizer, ids, context=()) -> list[str]:
    stream = TextStream(tokenizer, context)
    return [*(stream.push(token) for token in ids), stream.flush()]


def decoded(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


@given(WORDS)
@example(MIXED)
def test_bytes_become_whole_characters(text):
    pieces = streamed(BYTES, BYTES.encode(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ("\ufffd" if text.endswith("\ufffd") else "")  # a real U+FFFD comes one token late
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=60)
    | st.lists(st.sampled_from([*BYTES.encode("😀日é"), 2]), max_size=60)  # mostly broken characters
)
@example([BYTES.convert_tokens_to_ids("ð")] * 40)
@example([BYTES.encode("é")[0], *[2] * 20, BYTES.encode("é")[1]])  # specials within a character
@example([9999] * 40)  # padding of the head beyond the vocabulary
def test_any_tokens_give_what_decoding_at_once_gives(ids):
    stream = TextStream(BYTES)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        assert len(stream._window) <= 2 * MOST_HELD  # the cost of a token does not grow
    assert "".join(pieces) + stream.flush() == decoded(BYTES, ids)


@pytest.mark.parametrize("broken", range(2 * MOST_HELD))
def test_a_character_after_broken_bytes_is_whole(broken):
    face = BYTES.encode("😀")
    pieces = streamed(BYTES, [*[face[-1]] * broken, *face, face[0]])
    assert "".join(pieces) == "\ufffd" * broken + "😀" + "\ufffd"


@given(st.lists(st.sampled_from(range(3, SPACED.vocab_size)), max_size=20), WORDS)
def test_sentencepiece_spaces_and_bytes(ids, text):
    whole = [token for token in ids if token >= 259]
    fallback = [3 + byte for byte in text.encode()]
    ids = [*whole, *fallback, *whole]
    assert "".join(streamed(SPACED, ids)) == decoded(SPACED, ids)


def test_leading_space_of_the_first_new_token_is_kept():
    once, upon, a = (SPACED.convert_tokens_to_ids(token) for token in ("▁Once", "▁upon", "▁a"))
    assert streamed(SPACED, [upon, a], context=[once]) == [" upon", " a", ""]
    assert streamed(SPACED, [once, upon], context=[1]) == ["Once", " upon", ""]  # <s> alone is no text


def test_a_character_begun_in_the_context_comes_out():
    first, *rest = BYTES.encode("日本")
    assert "".join(streamed(BYTES, rest, context=[*BYTES.encode("say "), first])) == "日本"


def test_an_unfinished_end_shows_only_when_flushed():
    ids = BYTES.encode("ok 😀")[:-1]
    pieces = streamed(BYTES, ids)
    assert pieces[:-1] == ["o", "k", " ", "", "", ""] and pieces[-1] == "\ufffd"


def test_special_tokens_give_no_text():
    start, end = BYTES.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert streamed(BYTES, [start, *BYTES.encode("hi"), end]) == ["", "h", "i", "", ""]


@settings(max_examples=30)
@given(WORDS)
@example(MIXED)
def test_the_real_tokenizer(smollm, text):
    ids = smollm.encode(text, add_special_tokens=False)
    pieces = streamed(smollm, ids)
    assert "".join(pieces) == decoded(smollm, ids)  # not always `text`: its vocabulary lacks a few bytes
    if decoded(smollm, ids) == text and "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


# Stop strings


def cut_before(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, one character at a time: the first end of a stop string; the longest that ends there."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end - len(stop)], stop
    return text, None


AB = st.text(alphabet="ab\n", max_size=24)


@settings(max_examples=500)
@given(AB, st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4), st.data())
def test_the_cut_does_not_depend_on_the_pieces(text, stops, data):
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    stream = StopStrings(stops)
    out = "".join(stream.push(text[a:b]) for a, b in zip([0, *edges], [*edges, len(text)], strict=True))
    expected, stop = cut_before(text, stops)
    assert expected.startswith(out)  # never more than may be shown
    assert out + stream.finish() == expected
    assert stream.matched == stop


def test_no_more_is_held_back_than_may_become_a_stop():
    stream = StopStrings(["\nUser:", "###"])
    assert stream.push("Hello #") == "Hello "
    assert stream.push("1\n") == "#1"
    assert stream.push("Us") == ""
    assert stream.push("er") == ""
    assert stream.push(" x") == "\nUser x"
    assert stream.push("#") == "" and stream.push("## tail") == ""
    assert stream.matched == "###" and stream.push("more") == "" and stream.finish() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(BadInput):
        StopStrings([""])


# Chats


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_chat_is_the_template(smollm):
    ids = chat_ids(smollm, [turn("system", "Be brief."), turn("user", "Hi")])
    assert smollm.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat_ids(smollm, [turn("user", "Hi")], add_generation_prompt=False)[-2:] == [2, 198]


def test_the_next_turn_sends_only_what_is_new(smollm):
    talk = [turn("user", "Name a colour.")]
    prompt = chat_ids(smollm, talk)
    answer = smollm.encode("Blue.", add_special_tokens=False)
    talk += [turn("assistant", "Blue."), turn("user", "Another?")]
    rendered = chat_ids(smollm, talk)

    # The end-of-turn token was sampled, but is not in the cache: it is appended with the new message.
    held = [*prompt, *answer]
    keep, append = next_turn_ids(smollm, held, talk)
    assert keep == len(held) and held + append == rendered
    assert append[0] == smollm.eos_token_id and len(append) < 14


@given(st.data())
def test_the_next_turn_always_ends_in_the_rendered_chat(data):
    message = st.builds(turn, st.sampled_from(["user", "assistant"]), st.text("ab", max_size=4))
    old, new = data.draw(st.lists(message, min_size=1, max_size=4)), data.draw(st.lists(message, min_size=1))
    if data.draw(st.booleans()):
        new = old[: data.draw(st.integers(0, len(old)))] + new
    history = chat_ids(BYTES, old) + data.draw(st.lists(st.integers(0, 200), max_size=3))
    keep, append = next_turn_ids(BYTES, history, new)
    rendered = chat_ids(BYTES, new)
    assert append and history[:keep] + append == rendered
    assert keep == len(rendered) - 1 or keep == len(history) or history[keep] != rendered[keep]


def test_bad_chats_are_named():
    bare = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    with pytest.raises(BadInput, match="no chat template") as caught:
        chat_ids(bare, [turn("user", "Hi")])
    assert "instruction-tuned" in caught.value.advice
    for messages in ([], "Hi", turn("user", "Hi"), [{"role": "user"}], ["Hi"], [{"content": "Hi"}]):
        with pytest.raises(BadInput, match=r'"content"'):
            chat_ids(BYTES, messages)
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadInput, match="roles must alternate"):
        chat_ids(strict, [turn("user", "Hi")])
