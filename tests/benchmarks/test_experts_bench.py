from itertools import islice

import pytest
import torch

from benchmarks.models.bench_experts import Reader, Samples, Shape, choices, report, trees

SHAPE = Shape(width=8, inner=4, num_experts=12, num_chosen=3)


def test_an_expert_is_read_again_when_all_others_were() -> None:
    drawn = [routed.experts for routed in islice(choices(12, SHAPE, 1, seed=0), 8)]
    for start in (0, 4):
        read = torch.cat(drawn[start : start + 4]).view(-1)
        assert sorted(read.tolist()) == list(range(12))


def test_rows_of_a_tree_choose_each_for_itself() -> None:
    routed = next(trees(12, SHAPE, 5, seed=0))
    assert all(len(set(row)) == 3 for row in routed.experts.tolist())
    assert 3 < len(set(routed.experts.view(-1).tolist())) < 15


def test_a_share_is_the_time_of_reading_over_the_time_of_the_experts() -> None:
    samples = Samples(num_bytes=[100, 300], experts_s=[2.0, 4.0], read_s=[1.0, 3.0])
    figures = report(samples, one_row_s=1.5)
    assert figures["share"].median == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert figures["share_of_shortest"] == 0.5
    assert figures["experts_bytes_per_s"] == pytest.approx(200 / 3)
    assert figures["over_one_row"] == 2


def test_a_reader_reads_on_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.models.bench_experts._BUFFER_BYTES", 4096)
    reader = Reader()
    assert [float(reader.read(1600)) for _ in range(4)] == [400.0] * 4
    assert float(reader.read(1 << 20)) == 1024.0
