"""Each family on the allow-list is exact when packed: ragged sessions, prefill beside decode, spans that
overlap.

The tiny models have weights sharp enough that attention matters, and contexts go far beyond the sliding
window of 8.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from peer import attention, cache
from peer.attention import packed_attention
from peer.blocks import Blocks, Loading
from peer.cache import CacheBudget, CacheShape, _Memory
from peer.executor import Executor, PassItem
from routing.errors import BadInput, Overloaded
from routing.types import Span
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
from swarm.head import Head
from tests.tiny import EXTRA, FAMILIES, LONGROPE, VOCAB, WINDOW, make_tiny

TOLERANCE = 1e-4  # of the largest value
LENGTHS = (34, 27, 21)
# Rows of each session in each pass: one is in prefill while others decode, all lengths are passed.
PASSES = [(12, 5, 1), (1, 9, 0), (3, 1, 1), (1, 1, 14), (0, 1, 1), (11, 4, 1), (1, 1, 2), (5, 5, 1)]


pytestmark = pytest.mark.usefixtures("one_thread")


class Tiny:
    """A tiny model, whole and in pieces, and what the local model says of three sequences."""

    def __init__(self, family: str, folder) -> None:
        self.name = family
        self.checkpoint = open_checkpoint(str(make_tiny(family, folder)))
        self.family = family_of(self.checkpoint.config)
        self.head = Head.load(self.checkpoint, self.family, torch.float32)
        self.blocks = self.load(0, 4)
        make = torch.Generator().manual_seed(11)
        self.tokens = [torch.randint(0, VOCAB, (length,), generator=make) for length in LENGTHS]
        model = self.checkpoint.reference_model()
        states, self.logits = [], []
        for tokens in self.tokens:
            with torch.no_grad():
                seen = _block_states(model, self.family.layers, tokens)
                self.logits.append(model(tokens[None]).logits[0])
            states.append(seen)
        self.states = states  # per sequence: input of block 0, 1, 2, 3, output of block 3

    def load(self, start: int, end: int) -> Blocks:
        return Loading(self.checkpoint, self.family, Span(start, end), torch.float32).load_all()


def _block_states(model, layers, tokens):
    seen: list[torch.Tensor] = []
    blocks = list(model.base_model.get_submodule(layers))
    hooks = [
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].clone())) for block in blocks
    ]
    hooks.append(blocks[-1].register_forward_hook(lambda module, inputs, output: seen.append(output[0].clone())))
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Tiny:
    return Tiny("llama", tmp_path_factory.mktemp("one"))


def run_passes(blocks: Blocks, seats, inputs, passes=PASSES):
    """Runs `inputs` [length, hidden] of each seat through `passes`; all outputs of each seat in order."""
    executor, outputs = Executor(blocks), [[] for _ in seats]
    for counts in passes:
        items, who = [], []
        for index, (seat, rows, count) in enumerate(zip(seats, inputs, counts, strict=True)):
            part = rows[seat.position : seat.position + count]
            if len(part):
                items.append(PassItem(seat, part))
                who.append(index)
        result = executor.run(items)
        assert all(result.finite) and result.seconds > 0
        for index, output in zip(who, result.outputs, strict=True):
            outputs[index].append(output)
    return [torch.cat(parts) for parts in outputs]


def worst(ours, theirs) -> float:
    """Largest error, relative to the largest value."""
    return max(
        ((mine - other).abs().max() / other.abs().max()).item() for mine, other in zip(ours, theirs, strict=True)
    )


def embedded(tiny: Tiny):
    return [tiny.head.embed(tokens, torch.arange(len(tokens))) for tokens in tiny.tokens]


def test_packed_ragged_sessions_give_the_local_models_logits(kernels, tiny):
    seats = [tiny.blocks.seat(0, 4) for _ in LENGTHS]
    outputs = run_passes(tiny.blocks, seats, embedded(tiny))
    assert tuple(seat.position for seat in seats) == LENGTHS
    assert worst([tiny.head.logits(output) for output in outputs], tiny.logits) <= TOLERANCE
    for seat, output in zip(seats, outputs, strict=True):
        assert torch.equal(seat.rows(0, seat.position), output), "the journal is what was put out"


def test_a_middle_span_gives_the_local_models_states(tiny):
    blocks = tiny.load(1, 3)
    seats = [blocks.seat(1, 3) for _ in LENGTHS]
    outputs = run_passes(blocks, seats, [states[1] for states in tiny.states])
    assert worst(outputs, [states[3] for states in tiny.states]) <= TOLERANCE


def test_sessions_enter_and_leave_at_any_block_in_one_pass(kernels, tiny):
    spans = [(0, 3), (1, 4), (2, 3)]
    seats = [tiny.blocks.seat(entry, exit) for entry, exit in spans]
    inputs = [states[entry] for states, (entry, _) in zip(tiny.states, spans, strict=True)]
    outputs = run_passes(tiny.blocks, seats, inputs)
    assert worst(outputs, [states[exit] for states, (_, exit) in zip(tiny.states, spans, strict=True)]) <= TOLERANCE


def test_spans_with_nothing_between_them_share_a_pass(llama):
    seats = [llama.blocks.seat(0, 1), llama.blocks.seat(3, 4)]
    result = Executor(llama.blocks).run(
        [PassItem(seats[0], llama.states[0][0]), PassItem(seats[1], llama.states[1][3])]
    )
    assert worst(result.outputs, [llama.states[0][1], llama.states[1][4]]) <= TOLERANCE


def test_truncated_and_computed_again_is_the_same(tiny):
    seat, executor = tiny.blocks.seat(0, 4), Executor(tiny.blocks)
    rows = embedded(tiny)[0]

    def feed(start: int, end: int) -> torch.Tensor:
        return executor.run([PassItem(seat, rows[start:end])]).outputs[0]

    feed(0, 20)
    first = feed(20, 34)
    seat.truncate(9)
    executor.run([PassItem(seat, torch.randn(6, rows.shape[1]))])  # other content, which must leave no trace
    seat.truncate(9)
    feed(9, 20)
    assert seat.position == 20
    assert worst([feed(20, 34)], [first]) <= TOLERANCE
    assert worst([seat.rows(0, 34)], [tiny.states[0][4]]) <= TOLERANCE


def test_what_lies_behind_a_window_is_not_missed(kernels, tiny, monkeypatch):
    """Given back as soon as can be, and destroyed."""
    destroyed = []

    def destroy(memory: _Memory, block: int, start: int, end: int) -> None:
        for tensor in memory.extents[block]:
            tensor[:, :, start:end] = float("nan")
        destroyed.append(block)

    monkeypatch.setattr(_Memory, "give_back_block", destroy)
    monkeypatch.setattr(cache, "GO_BACK", 0)
    monkeypatch.setattr(cache, "DROP_LEAST", 1)
    monkeypatch.setattr(CacheShape, "page", 1)
    seats = [tiny.blocks.seat(0, 4) for _ in LENGTHS]
    outputs = run_passes(tiny.blocks, seats, embedded(tiny))
    assert worst(outputs, [states[4] for states in tiny.states]) <= TOLERANCE
    assert set(destroyed) == set(tiny.blocks.windows)
    assert set(tiny.blocks.windows.values()) <= {WINDOW}
    assert bool(destroyed) == ("sliding_window" in EXTRA[tiny.name])


def test_sessions_of_both_regimes_of_longrope_share_a_pass(kernels, tmp_path):
    checkpoint = open_checkpoint(str(make_tiny("phi3", tmp_path, **LONGROPE)))
    blocks = Loading(checkpoint, family_of(checkpoint.config), Span(0, 4), torch.float32).load_all()
    model = checkpoint.reference_model()
    lengths, states = (20, 24, 25, 60), []
    for length in lengths:
        tokens = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            states.append(_block_states(model, "layers", tokens))
    seats, outputs = [blocks.seat(0, 4) for _ in lengths], [[] for _ in lengths]
    for start, end in ((0, 17), (17, 19), (19, 20), (20, 24), (24, 25), (25, 60)):
        active = [index for index, length in enumerate(lengths) if start < length]
        items = [
            PassItem(seats[index], states[index][0][start:end], long=blocks.rotary.is_long(lengths[index]))
            for index in active
        ]
        for index, output in zip(active, Executor(blocks).run(items).outputs, strict=True):
            outputs[index].append(output)
    assert worst([torch.cat(parts) for parts in outputs], [seen[4] for seen in states]) <= TOLERANCE


def test_the_tests_would_see_attention_that_is_wrong(tiny, monkeypatch):
    """With queries of zero, attention is uniform over the keys: masks, caches and positions hardly matter
    then.
    """

    def blind(module, query, *arguments, **options):
        return packed_attention(module, torch.zeros_like(query), *arguments, **options)

    AttentionInterface.register("swarm_blind", blind)
    blocks = tiny.load(0, 4)
    for layer in blocks.layers:
        for module in layer.modules():
            if vars(module).keys() >= {"layer_idx", "config"}:
                module.config._attn_implementation = "swarm_blind"
    monkeypatch.setattr(attention, "packed_attention", blind)  # which our own layers find by no name
    seats = [blocks.seat(0, 4) for _ in LENGTHS]
    outputs = run_passes(blocks, seats, embedded(tiny))
    assert worst([tiny.head.logits(output) for output in outputs], tiny.logits) > 1000 * TOLERANCE


def test_the_tests_would_see_a_session_that_reads_anothers_cache(tiny):
    seats = [tiny.blocks.seat(0, 4) for _ in LENGTHS]
    inputs = embedded(tiny)
    right = run_passes(tiny.blocks, seats, inputs, [(20, 20, 20)])
    seats[0]._memory, seats[1]._memory = seats[1]._memory, seats[0]._memory
    outputs = run_passes(tiny.blocks, seats, inputs, [(1, 1, 1)])
    for index, seen in ((0, True), (1, True), (2, False)):
        expected = tiny.states[index][4][20:21]
        assert (worst([outputs[index]], [expected]) > 100 * TOLERANCE) is seen
    assert len(right) == 3


def test_all_or_nothing(llama, monkeypatch):
    seats = [llama.blocks.seat(0, 4), llama.blocks.seat(0, 2)]
    inputs = [states[0] for states in llama.states[:2]]
    run_passes(llama.blocks, seats, inputs, [(10, 10)])
    journals = [seat.rows(0, 10) for seat in seats]
    broken = llama.blocks.layers[3]

    def fails(*arguments, **options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(broken, "forward", fails)
        patched.setattr(type(llama.blocks.fused), "get", lambda *arguments: None)
        with pytest.raises(RuntimeError, match="out of memory"):
            run_passes(llama.blocks, seats, inputs, [(3, 40)])
    assert [seat.position for seat in seats] == [10, 10]
    assert all(torch.equal(seat.rows(0, 10), rows) for seat, rows in zip(seats, journals, strict=True))
    outputs = run_passes(llama.blocks, seats, inputs, [(24, 17)])
    assert worst(outputs, [llama.states[0][4][10:34], llama.states[1][2][10:27]]) <= TOLERANCE


def test_a_full_cache_stops_the_pass_before_it_computes(llama):
    budget = CacheBudget(llama.blocks.shape.page * llama.blocks.shape.position_bytes(4))
    rich, poor, late = llama.blocks.seat(0, 4), llama.blocks.seat(0, 4, budget), llama.blocks.seat(0, 4, budget)
    rows = llama.states[0][0]
    executor = Executor(llama.blocks)
    executor.run([PassItem(rich, rows[:5]), PassItem(poor, rows[:5])])
    with pytest.raises(Overloaded):
        executor.run([PassItem(rich, rows[5:9]), PassItem(late, rows[:5])])
    assert (rich.position, poor.position, late.position) == (5, 5, 0)


def test_other_passes_may_run_between_the_blocks_of_one(tiny):
    """A long prompt is left after each block for a decode step of another session."""
    long, other = tiny.blocks.seat(0, 4), tiny.blocks.seat(0, 4)
    rows, executor = embedded(tiny), Executor(tiny.blocks)
    executor.run([PassItem(other, rows[1][:3])])
    packed, steps = executor.begin([PassItem(long, rows[0])]), []
    while not packed.advance(lambda seconds: True):
        assert long.position == 0
        steps.append(executor.run([PassItem(other, rows[1][other.position : other.position + 1])]).outputs[0])
    assert len(steps) == 4 and packed.result is not None
    assert long.position == len(rows[0])
    assert worst([packed.result.outputs[0]], [tiny.states[0][4]]) <= TOLERANCE
    assert worst([torch.cat(steps)], [tiny.states[1][4][3:7]]) <= TOLERANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_told_for_their_session_alone(tiny, value):
    seats = [tiny.blocks.seat(0, 4) for _ in range(3)]
    rows = [part[:5].clone() for part in embedded(tiny)]
    rows[1][2, 7] = value
    result = Executor(tiny.blocks).run([PassItem(seat, part) for seat, part in zip(seats, rows, strict=True)])
    assert result.finite == [True, False, True]
    others = [result.outputs[0], result.outputs[2]]
    assert worst(others, [tiny.states[0][4][:5], tiny.states[2][4][:5]]) <= TOLERANCE


@pytest.mark.parametrize("shape", [(0, 64), (1, 63), (64,), (1, 1, 64)])
def test_rows_of_another_shape_are_refused(llama, shape):
    seat = llama.blocks.seat(0, 4)
    with pytest.raises(BadInput, match="64"):
        Executor(llama.blocks).run([PassItem(seat, torch.zeros(shape))])
    assert seat.position == 0


def test_bf16_stays_near_the_local_bf16_model(tiny):
    """bf16 rounds each kernel's result: how far from fp32 the local model itself is, bounds how far we may
    be.
    """
    blocks = Loading(tiny.checkpoint, tiny.family, Span(0, 4), torch.bfloat16).load_all()
    head = Head.load(tiny.checkpoint, tiny.family, torch.bfloat16)
    seats = [blocks.seat(0, 4) for _ in LENGTHS]
    inputs = [head.embed(tokens, torch.arange(len(tokens))) for tokens in tiny.tokens]
    ours = [head.logits(output) for output in run_passes(blocks, seats, inputs)]
    model = tiny.checkpoint.reference_model(torch.bfloat16)
    with torch.no_grad():
        local = [model(tokens[None]).logits[0].float() for tokens in tiny.tokens]

    def mean_error(logits) -> float:
        pairs = zip(logits, tiny.logits, strict=True)
        return sum((mine - exact).abs().mean().item() for mine, exact in pairs)

    assert mean_error(ours) <= 1.5 * mean_error(local)


def test_two_spans_of_the_real_model_write_the_local_models_text(tmp_path):
    checkpoint = open_checkpoint("smollm2")
    family = family_of(checkpoint.config)
    head = Head.load(checkpoint, family, torch.float32)
    spans = [Loading(checkpoint, family, span, torch.float32).load_all() for span in (Span(0, 13), Span(13, 30))]
    prompt = checkpoint.tokenizer()("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        local = checkpoint.reference_model().generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    seats = [blocks.seat(blocks.span.start, blocks.span.end) for blocks in spans]
    tokens = prompt[0].tolist()
    while len(tokens) < local.shape[1]:
        start = seats[0].position
        hidden = head.embed(torch.tensor(tokens[start:]), torch.arange(start, len(tokens)))
        for blocks, seat in zip(spans, seats, strict=True):
            (hidden,) = Executor(blocks).run([PassItem(seat, hidden)]).outputs
        tokens.append(int(head.logits(hidden[-1:]).argmax()))
    assert tokens == local[0].tolist()
