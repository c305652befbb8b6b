"""Passes of every size before the first request: tiles follow the number of rows."""

from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.layers.lora import LoraWeights

_SALT = "warm-up"


def warm_up_passes(
    runner: ModelRunner, *, max_rows: int, adapter: LoraWeights | None = None
) -> None:
    """Run a prompt of each power of 2 up to `max_rows`, as far as the cache has room; keep nothing.

    The step's own chunks would not do: while kernels are compiled, passes look slow, so they are
    kept short. `adapter`: of all rows.
    """
    assert runner.max_context is not None  # set when the runner is made
    most = min(max_rows, runner.max_context)
    num_rows = 1
    while num_rows < 2 * most:
        view = runner.new_view(_SALT, adapter, is_shared=False)
        try:
            tokens = [0] * min(num_rows, most)
            runner.copy_blocks(view.reserve(len(tokens)))
            rows = ForwardSlice(view=view, token_ids=tokens, start_slot=0, num_logit_rows=1)
            runner.forward([rows])
        finally:
            view.release()
        num_rows *= 2
