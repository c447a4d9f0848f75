"""Bins of rows -> the tensors of one micro-batch.

T tokens of all documents one after the other, N of them with a label to predict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from shardwise.data import Documents


@dataclass(frozen=True)
class MicroBatch:
    """One row of packed documents. `positions` index the T tokens whose next token is a target."""

    input_ids: torch.Tensor  # (1, T) int64
    position_ids: torch.Tensor  # (1, T) int64, from 0 in every document
    positions: torch.Tensor  # (N,) int64
    targets: torch.Tensor  # (N,) int64
    document_lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.document_lengths)

    @property
    def trained_tokens(self) -> int:
        return int(self.targets.shape[0])

    def to(self, device: torch.device | str) -> "MicroBatch":
        move = {"device": device, "non_blocking": True}
        return MicroBatch(
            self.input_ids.to(**move),
            self.position_ids.to(**move),
            self.positions.to(**move),
            self.targets.to(**move),
            self.document_lengths,
        )


def pack(rows: "Documents", bins: Sequence[Sequence[int]]) -> MicroBatch:
    """The rows of some bins as one micro-batch.

    No bins: a rank without work still takes part in every collective, with one token and no label.
    """
    documents = [rows.row(i) for one in bins for i in one]
    return pack_documents(documents or [(np.zeros(1, np.int32), np.full(1, -100, np.int32))])


def pack_documents(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> MicroBatch:
    """(ids, labels) pairs, labels[t] belonging to ids[t] and -100 where untrained, as one micro-batch.

    A label at the first token of a document has nothing before it to be predicted from and is no target.
    """
    lengths = tuple(len(ids) for ids, _ in documents)
    labels = np.concatenate([labels for _, labels in documents]).astype(np.int64)
    starts = np.cumsum((0, *lengths[:-1]))
    labels[starts] = -100
    labelled = np.flatnonzero(labels != -100)
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([ids for ids, _ in documents]).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]).astype(np.int64))[None],
        positions=torch.from_numpy(labelled - 1),
        targets=torch.from_numpy(labels[labelled]),
        document_lengths=lengths,
    )
