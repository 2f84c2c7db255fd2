"""Bytes alive are counted as they come and go, and the meta device needs as many as real tensors do."""

import pytest
import torch

from gptqkit.footprint import Footprint, dry_run, storage_id
from gptqkit.quantizer.modules import find_blocks
from gptqkit.quantizer.stream import BlockStream
from gptqkit.sizes import shapes_of
from support.models import MODELS, build


def test_views_cost_nothing_and_what_was_there_before_is_not_counted():
    before = torch.zeros(1000)
    with Footprint() as footprint:
        view = before.view(10, 100)[2:]
        view += 1
        first = view.T.contiguous()
        assert (footprint.live, footprint.peak) == (3200, 3200)
        second = first @ first.T
        assert footprint.live == 3200 + 40000
        del first
        assert (footprint.live, footprint.peak) == (40000, 43200)
    del second
    assert footprint.live == 0


def test_storages_are_told_apart_on_the_meta_device():
    first, second = torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta")
    assert storage_id(first) == storage_id(first[1:])
    assert storage_id(first) != storage_id(second)


def test_questions_about_numbers_have_answers():
    with dry_run(experts=3):
        numbers = torch.empty(3, 5, device="meta")
        assert not (numbers > 0).all()
        assert int(numbers.long().max()) == 0
        assert (numbers > 0).nonzero().shape == (5, 2)
        assert torch.where(numbers[0] > 0)[0].shape == (5,)


@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_holds_what_a_real_forward_pass_holds(name):
    """Masks and fused attention are not quite the same on every device: within 10 %."""
    model = build(name)
    heights = []
    for each, context in ((model, Footprint), (shapes_of(model), dry_run)):
        stream = BlockStream(each, find_blocks(each)[1])
        batch = {"input_ids": torch.zeros(4, 64, dtype=torch.int64, device=each.device)}
        with torch.no_grad(), context() as footprint:
            hidden = stream.embed(batch)
            hidden = stream.run(1, batch, hidden)
        assert hidden.shape == (4, 64, 64)
        heights.append(footprint.peak)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)
