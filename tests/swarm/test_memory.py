"""Tensors in an arena are the tensors that were placed, side by side."""

from __future__ import annotations

import torch

from swarm.memory import ALIGNMENT, HUGE_PAGE, Arena, placed_bytes


def test_tensors_lie_side_by_side_from_a_huge_page_on():
    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(4, 6).T, torch.randn(0, 3)]
    arena = Arena(sum(placed_bytes(tensor.nbytes) for tensor in tensors))
    placed = [arena.place(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, placed, strict=True):
        assert torch.equal(tensor, copy) and copy.dtype == tensor.dtype and copy.is_contiguous()
    starts = [copy.data_ptr() for copy in placed[:3]]
    assert starts == [starts[0], starts[0] + ALIGNMENT, starts[0] + 2 * ALIGNMENT] and starts[0] % HUGE_PAGE == 0
    placed[0].fill_(9)
    assert torch.equal(placed[1], tensors[1])


def test_what_finds_no_room_is_a_plain_copy():
    tensor = torch.randn(100)
    arena = Arena(64)
    copy = arena.place(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(arena.place(tensor[:16]), tensor[:16])
