"""A model split over several devices, by the plan that transformers has for its architecture.

Each rank reads its own part of every weight that the plan splits, and the whole of the others, straight from the
files: no rank ever holds the whole model. Splitting goes by heads in the attention and by columns in what lies between
two matrices, so a layer costs two sums over all ranks; where the vocabulary is split, each rank ends with the logits of
all tokens all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from batchjobs.errors import UsageError
from workers.engine import models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BY_COLUMNS = ("colwise", "local_colwise")
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
_LAYER = "layers."
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # by which transformers knows its rank and device


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of a model. ``device`` is where it lies."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    def options(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained``, which every rank calls with the same ones."""
        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan="auto")}

    @staticmethod
    def held_here(tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that lies in this process's memory."""
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        return local

    @contextmanager
    def environment(self) -> Iterator[None]:
        """What transformers reads there while it loads."""
        before = {name: os.environ.get(name) for name in _VARIABLES}
        index = self.rank if self.device.index is None else self.device.index
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(index), WORLD_SIZE=str(self.size))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def refuse_unsplittable(source: str, size: int, revision: str | None = None) -> None:
    """Say at once, in one sentence, why a model cannot be split over ``size`` devices. Reads no weight.

    Raises:
        UsageError: It cannot, or there is no such model.
    """
    with models.quiet_transformers():
        try:
            where = models.locate(source, revision)
            config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
            models.refuse_unsupported(config, source)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        except UsageError:
            raise
        except Exception as error:  # whatever a broken folder raises, the user wants one sentence
            raise UsageError(f"cannot read the model {source!r}: {models.first_sentence(error)}") from error
    if "gguf_file" in where:
        raise UsageError(f"{source!r} is read as it is, and can then not be split: convert it to .safetensors first")
    if getattr(config, "quantization_config", None):
        raise UsageError(f"{source!r} is quantized; only models in float32, bfloat16 or float16 can be split")
    if (reason := why_not(model, size)) is not None:
        raise UsageError(f"{source!r} ({config.model_type}) cannot be split over {size} devices: {reason}")


def why_not(model: PreTrainedModel, size: int) -> str | None:
    """What keeps a model from being split over ``size`` devices; None when nothing does."""
    plan = model.tp_plan or {}
    if not any(name.startswith(_LAYER) or f".{_LAYER}" in name for name in plan):
        return "transformers has no plan by which its layers could be split"
    splits_heads = any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style in BY_COLUMNS for name, style in plan.items()
    )
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for count, kind in ((heads, "attention heads"), (kv_heads, "key and value heads")):
        if splits_heads and count % size:
            return f"it has {count} {kind}, which {size} does not divide"
    return None
