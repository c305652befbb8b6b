"""DFlash (2026): a few layers that guess a block of tokens in one pass, each seeing all others.

The layers know the text by the large model's hidden states alone. In every layer, the keys and
values of text rows are made of a projection of these states. Nothing else of text rows is computed.
A block's rows are the last token and masks; they see the text and each other.
"""

from pathlib import Path

import torch
from torch import Tensor

from outrider.draft.heads.decoder_head import HeadBase, HeadParts, layer_reader
from outrider.draft.heads.eagle3 import IGNORED, renamed
from outrider.draft.heads.head_config import HeadConfig
from outrider.draft.heads.head_reader import HeadReader
from outrider.draft.heads.protocol import BlockLayout, HeadError, TargetModel
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.layers import normalise
from outrider.engine.model.protocol import ForwardOutput
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.engine.model.weights import ProgressCallback
from outrider.kernels.attention.paged_attention import Plan
from outrider.kernels.layers.lora import LoraRows
from outrider.kernels.triton_support import uses_triton


class DFlashHead(HeadBase):
    """A DFlash drafter. The rows that want logits are blocks' rows, all others text rows."""

    can_record = False  # recorded passes have logits of all rows, so that none would be text

    def __init__(self, parts: HeadParts) -> None:
        """Read the projection and the layers."""
        reader, layers = parts.reader, parts.layers
        width = layers.config.hidden_size
        num_read = len(parts.taps) * reader.target.config.hidden_size
        self._fc = reader.linear("fc.weight", (width, num_read))
        self._feature_norm = layers.norm("hidden_norm.weight")
        self._layers = tuple(layers.read(index) for index in range(layers.config.num_layers))
        super().__init__(parts)

    @torch.inference_mode()
    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Return what text rows' keys and values are made of: [n, hidden_size]."""
        projected = self._fc(taps)
        return normalise(self._feature_norm, None, projected, is_fused=uses_triton(taps))

    @torch.inference_mode()
    def forward(  # noqa: PLR0913 - all of a pass
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: Plan,
        kv_cache: KVCache,
        logit_rows: Tensor | None,
        *,
        logits_out: Tensor | None = None,
        lora: LoraRows | None = None,
        recurrent: RecurrentPass | None = None,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
    ) -> ForwardOutput:
        """Run n rows; see `DecoderModel.forward`. Rows in logit_rows are those of blocks.

        `features`: [n, feature_size], of text rows; blocks' rows may carry anything. Tokens of text
        rows are not read.
        """
        assert features is not None, "the rows of a head carry features"
        assert (lora, recurrent, taps) == (None, None, ()), "heads have none of these"
        here = self._shared(positions, slot_mapping, attention, kv_cache)
        if logit_rows is not None and not logit_rows.shape[0]:
            for index, layer in enumerate(self._layers):
                self._attend.keep(layer, index, features, here)
            return self._nothing(logits_out)
        if logit_rows is not None:
            token_ids = token_ids.index_select(0, logit_rows)
        residual = self._embed(token_ids, here)  # [m, hidden_size], of blocks' rows
        update: Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = normalise(layer.before_attention, update, residual, is_fused=here.is_fused)
            rows = normed
            if logit_rows is not None:
                rows = features.index_copy(0, logit_rows, normed)
            attended = self._attend(layer, index, rows, here)
            if logit_rows is not None:
                attended = attended.index_select(0, logit_rows)
            output = layer.output(attended)
            normed = normalise(layer.before_mlp, output, residual, is_fused=here.is_fused)
            update = layer.mlp(normed, is_fused=here.is_fused)
        assert update is not None
        hidden = normalise(self._final_norm, update, residual, is_fused=here.is_fused)
        return ForwardOutput(logits=self._logits(hidden, logits_out), hidden=hidden)


def read_dflash(
    folder: Path,
    config: HeadConfig,
    target: TargetModel,
    *,
    max_context: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> DFlashHead:
    """Read a DFlash drafter; raises UnsupportedModelError for a file that is none."""
    shape = config.layers
    assert config.mask_token_id is not None, "checked with the config"
    if config.causal_windows and shape.sliding_window is not None:
        raise HeadError(
            f"{folder} has layers with a window whose rows see no later rows of a block, which is "
            "not supported; drafters with sliding_window_non_causal or without windows are."
        )
    with HeadReader(folder, target, renamed=renamed, on_progress=on_progress) as reader:
        parts = HeadParts(
            kind="dflash",
            reader=reader,
            target_token_ids=reader.target_token_ids(config),
            layers=layer_reader(reader, shape),
            head=reader.head(shape.vocab_size, shape.hidden_size),
            taps=config.taps,
            block=BlockLayout(
                num_rows=config.block_size,
                first_row=0 if config.samples_first else 1,
                mask_token_id=config.mask_token_id,
                is_bidirectional=True,
                is_behind_text=True,
            ),
            max_context=max_context,
        )
        head = DFlashHead(parts)
        reader.finish(ignorable=IGNORED)
    return head
