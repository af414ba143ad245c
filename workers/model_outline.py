"""A model without its weights: how it reads a prompt, how long its context is, and what its keys and values take.

Everything comes from its configuration, its tokenizer and its chat template, read as :mod:`workers.engine.models` does.
The sizes of the layers come from a forward on torch's ``meta`` device, where tensors have shapes alone.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig

from batchjobs.errors import UsageError
from batchjobs.models import short_name
from workers.engine import gguf, models
from workers.engine.attention.interface import LayerSpec
from workers.engine.cache import LayerGroup, group_layers, page_bytes
from workers.engine.folders import cache_folder
from workers.engine.models import choose_device, locate, quiet_transformers, refuse_unsupported
from workers.engine.pages import PagePool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_OUTLINE = "batchjobs_outline"
_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """``max_model_len`` is in tokens, prompt and answer together; ``dtype`` and ``device`` are those that a worker
    would take, on this machine unless a device is named. ``layers`` is None where the sizes cannot be told without the
    weights."""

    name: str
    architecture: str
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: str
    layers: tuple[LayerSpec, ...] | None


@dataclass(frozen=True, slots=True)
class KVSizes:
    """What keys and values take, as the engine lays them out: pages of ``page_size`` tokens for each group of layers.

    ``pool`` knows how many pages a sequence needs; it stands for no memory.
    """

    specs: tuple[LayerSpec, ...]
    groups: list[LayerGroup]
    page_size: int
    dtype: torch.dtype
    pool: PagePool

    @property
    def page_bytes(self) -> int:
        return page_bytes(self.specs, self.groups, self.page_size, self.dtype)

    @property
    def token_bytes(self) -> int:
        """Of one token that every layer still sees."""
        each = (spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in self.specs)
        return sum(each) * self.dtype.itemsize

    @property
    def windows(self) -> list[int]:
        """The sliding windows in tokens, each once."""
        return sorted({group.window for group in self.groups if group.window is not None})


def read_outline(
    source: str, *, device: str = "auto", dtype: str = "auto", revision: str | None = None
) -> ModelOutline:
    """Reads what there is of the model beside its weights.

    Raises:
        UsageError: There is no such model, it cannot be read, or the engine cannot run its architecture.
    """
    torch_device = _device(device)
    with quiet_transformers():
        try:
            where = _locate(source, revision)
            config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
            refuse_unsupported(config, source)
            tokenizer = models.load_tokenizer(where, source)
            generation = _generation_config(where, config)
        except UsageError:
            raise
        except Exception as error:  # whatever a broken folder raises, the user wants one sentence
            raise UsageError(f"cannot read the model {source!r}: {models.first_sentence(error)}") from error
        layers = _layers(config)
    return ModelOutline(
        name=short_name(source),
        architecture=str(config.model_type),
        tokenizer=tokenizer,
        max_model_len=models.context_length(config),
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        eos_ids=models.eos_ids_of(generation, config, tokenizer),
        dtype=models.chosen_dtype(dtype, torch_device, config),
        device=str(torch_device),
        layers=layers,
    )


def kv_sizes(outline: ModelOutline, page_size: int, num_blocks: int | None) -> KVSizes | None:
    """None where the model's layers are not known. Without ``num_blocks`` there are pages enough for any request."""
    if outline.layers is None:
        return None
    groups = group_layers(outline.layers)
    enough = len(groups) * (-(-outline.max_model_len // page_size) + 1) + 1
    pool = PagePool(num_blocks or enough, page_size, windows=[group.window for group in groups])
    return KVSizes(outline.layers, groups, page_size, outline.dtype, pool)


def _device(name: str) -> torch.device:
    """A device that is named may be the workers' alone. ``cuda:all`` is one of them for each."""
    name = name.removesuffix(":all")
    with suppress(RuntimeError):
        return choose_device(name) if name == "auto" else torch.device(name)
    return choose_device(name)  # which says what is wrong with it


def _locate(source: str, revision: str | None) -> dict[str, str]:
    """As the engine finds it; but a ``.gguf`` file that was never loaded is read as it is, which takes some seconds:
    only its weights would be worth a conversion."""
    path = Path(source).expanduser()
    if path.suffix != ".gguf" or not path.is_file() or _is_converted(path):
        return locate(source, revision)
    if revision is not None:
        raise UsageError(f"{source} is a file or folder here; only a model of the hub has a revision")
    log.warning("%s was never loaded on this machine; until then reading it takes half a minute", path.name)
    gguf.check_rope(path)
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _is_converted(file: Path) -> bool:
    folder = cache_folder() / "models"
    if not any(folder.glob(f"{file.stem}-*")):
        return False
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return (folder / f"{file.stem}-{digest[:16]}" / "config.json").is_file()


def _generation_config(where: dict[str, str], config: Any) -> GenerationConfig | None:
    if "gguf_file" in where:
        return None
    try:
        return GenerationConfig.from_pretrained(where["pretrained_model_name_or_path"], revision=where.get("revision"))
    except OSError:  # it has none
        return None


def _layers(config: Any) -> tuple[LayerSpec, ...] | None:
    """The layers that a probe of the loaded model would find; None where a model cannot run on shapes alone."""
    found: list[LayerSpec] = []

    def outline_forward(
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, Hq, T, D]
        key: torch.Tensor,  # [1, Hkv, T, D]
        value: torch.Tensor,  # [1, Hkv, T, Dv]
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        found.append(_spec(len(found), query, key, value, options.get("sliding_window")))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None

    AttentionInterface.register(_OUTLINE, outline_forward)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Some layers of experts have no shapes in float32.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
        model.set_attn_implementation(_OUTLINE)
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, _TOKENS), dtype=torch.long, device="meta"), use_cache=False)
    except Exception:  # noqa: BLE001  a model that computes with values: its sizes stay unknown
        return None
    return tuple(found) if len(found) == config.get_text_config(decoder=True).num_hidden_layers else None


def _spec(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Any) -> LayerSpec:
    return LayerSpec(
        index=index,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scaling=query.shape[3] ** -0.5,
        sliding_window=window if isinstance(window, int) else None,
    )
