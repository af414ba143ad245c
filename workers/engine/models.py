"""Loading a model from a folder, a ``.gguf`` file or a hub id, with its tokenizer, limits and version."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from batchjobs.errors import UsageError
from batchjobs.models import short_name
from workers.engine import gguf, versions
from workers.engine.mapped_files import own_memory
from workers.engine.weights import check_weights

if TYPE_CHECKING:
    from workers.engine.parallel.loading import Split

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 2048  # tokens, where a configuration names none
UNSUPPORTED_ROPE = ("dynamic", "longrope")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model ready for the engine.

    ``version`` names it by its content (``sha256:`` and 16 hex digits, see :mod:`workers.engine.versions`). ``details``
    say more: ``architecture``, ``parameters``, ``bytes`` of the files, the whole digests ``weights_sha256`` and
    ``reading_sha256`` and, of a hub model, its commit as ``revision``. ``max_model_len`` is in tokens, prompt and
    answer together. ``eos_ids`` end an answer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    version: str
    max_model_len: int
    eos_ids: frozenset[int]
    details: dict[str, object] = field(default_factory=dict)


def load_model(
    source: str, *, device: torch.device, dtype: str, revision: str | None = None, split: Split | None = None
) -> LoadedModel:
    """Load ``source`` for evaluation. Its weights lie in memory: what becomes of the files later changes nothing.

    ``revision`` is a branch, tag or commit of a hub model. With ``split`` it is one rank's part of the model, while the
    other ranks load theirs; only the driver's knows its version.

    Raises:
        UsageError: There is no such model, it cannot be loaded, or the engine cannot run its architecture.
    """
    with quiet_transformers(), ThreadPoolExecutor(1, "digest") as beside:
        try:
            where = locate(source, revision)
            config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
            refuse_unsupported(config, source)
            snapshot = None if Path(source).expanduser().exists() else versions.snapshot_folder(source, revision)
            if snapshot is not None:
                where["revision"] = snapshot.name  # a branch that moves on meanwhile must not mix two commits
            files = versions.model_files(Path(source).expanduser() if snapshot is None else snapshot)
            state = versions.state_of(files)
            named = files if split is None or split.is_driver else ()
            digest = beside.submit(versions.weights_digest, named)  # on another core than the loading
            with nullcontext() if split is None else split.environment():
                model, report = AutoModelForCausalLM.from_pretrained(
                    **where,
                    dtype=chosen_dtype(dtype, device, config),
                    trust_remote_code=False,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    output_loading_info=True,
                    **({} if split is None else split.options()),
                )
            tokenizer = load_tokenizer(where, source)
        except UsageError:
            raise
        except Exception as error:  # whatever a broken checkpoint raises, the user wants one sentence
            raise UsageError(f"cannot load the model {source!r}: {first_sentence(error)}") from error
    check_weights(report, source)
    model.requires_grad_(False)
    model.eval()
    if split is None:
        model.to(device)
    weights_here = (*model.parameters(), *model.buffers())
    own_memory(weights_here if split is None else map(split.held_here, weights_here))
    eos_ids = eos_ids_of(model.generation_config, config, tokenizer)
    weights, reading = digest.result(), versions.reading_digest(config, tokenizer, eos_ids)
    if versions.state_of(files) != state:  # else the name would be that of other weights
        raise UsageError(f"the files of {source!r} changed while they were read; try again when nobody writes them")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=short_name(source),
        version=versions.version_of(weights, reading),
        max_model_len=context_length(config),
        eos_ids=eos_ids,
        details=versions.details(model, files, weights, reading, None if snapshot is None else snapshot.name),
    )


def choose_device(name: str) -> torch.device:
    """``auto`` takes cuda, then mps, then cpu."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"no such device: {name!r}; use auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device here; use --device cpu, or install a CUDA build of torch")
    return device


def refuse_unsupported(config: Any, source: str) -> None:
    """Say at once, in one sentence, why an architecture cannot run."""
    kind = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{source!r} is an encoder-decoder model ({kind}); only decoder-only models can run here")
    text = config.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "takes more than text" if text is not config else "does not continue text"
        raise UsageError(f"{source!r} is a model ({kind}) that {what}; only causal language models can run here")
    quantized = getattr(config, "quantization_config", None)
    if quantized and not AutoHfQuantizer.supports_quant_method(quantized):  # its weights would be taken as they are
        method = quantized.get("quant_method")
        raise UsageError(f"{source!r} is quantized by {method!r}, which the transformers library here cannot read")
    layer_types = set(getattr(text, "layer_types", None) or ())
    other = layer_types - {"full_attention", "sliding_attention"}
    if other:
        raise UsageError(
            f"{source!r} ({kind}) has layers of a kind that cannot run on packed rows: {', '.join(sorted(other))}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(rope.get("rope_type"))} | {str(v.get("rope_type")) for v in rope.values() if isinstance(v, dict)}
    if bad := kinds.intersection(UNSUPPORTED_ROPE):
        raise UsageError(
            f"{source!r} ({kind}) uses {', '.join(sorted(bad))} RoPE, whose frequencies depend on the longest prompt "
            "in a step: a neighbour could change a result, so it is not supported"
        )


def locate(source: str, revision: str | None = None) -> dict[str, str]:
    """The arguments with which transformers' ``from_pretrained`` finds the model. Raises UsageError."""
    path = Path(source).expanduser()
    if revision is not None and (path.exists() or path.suffix == ".gguf"):
        raise UsageError(f"{source} is a file or folder here; only a model of the hub has a revision")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"no such file: {source}; a model is a folder, a .gguf file or a hub id")
        problem = gguf.why_not(path)
        if problem is None:
            return {"pretrained_model_name_or_path": str(gguf.converted(path))}
        log.warning("%s is read as it is, which takes long each time: %s", path.name, problem)
        gguf.check_rope(path)
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if (path / "adapter_config.json").is_file():  # it names another model to load, or would be passed over
        raise UsageError(f"{source} holds an adapter, which is not applied here; merge it into its base model first")
    if path.exists() and not (path / "config.json").is_file():
        raise UsageError(f"{source} holds no config.json: it is not a model folder")
    if not path.exists() and (source.count("/") > 1 or source.startswith((".", "/", "~"))):
        raise UsageError(f"no such folder: {source}; a model is a folder, a .gguf file or a hub id")
    if path.exists():
        return {"pretrained_model_name_or_path": str(path)}
    return {"pretrained_model_name_or_path": source} | ({} if revision is None else {"revision": revision})


def load_tokenizer(where: dict[str, str], source: str) -> PreTrainedTokenizerBase | None:
    folder = Path(where["pretrained_model_name_or_path"])
    tokenizer_files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if "gguf_file" not in where and folder.is_dir() and not any((folder / f).exists() for f in tokenizer_files):
        log.warning("%s has no tokenizer: only prompts of token ids can run", source)
        return None
    return AutoTokenizer.from_pretrained(**where, trust_remote_code=False)


def chosen_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    if name != "auto":
        return TORCH_DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def context_length(config: Any) -> int:
    """The configuration's own; YaRN may reach further than the length that the model was made for."""
    text = config.get_text_config(decoder=True)
    lengths = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_sequence_length")]
    length = next((n for n in lengths if isinstance(n, int)), DEFAULT_CONTEXT)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        length = max(length, int(rope["factor"] * rope.get("original_max_position_embeddings", length)))
    return length


def eos_ids_of(
    generation: GenerationConfig | None, config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    own = getattr(generation, "eos_token_id", None)
    if own is None:
        own = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if own is None and tokenizer is not None:
        own = tokenizer.eos_token_id
    if own is None:
        return frozenset()
    return frozenset(own if isinstance(own, list) else [own])


def first_sentence(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return (
            "it brings Python code of its own, which is never run; take a checkpoint that transformers can read alone"
        )
    if isinstance(error, SafetensorError):
        return f"one of its .safetensors files is damaged or cut off ({error})"
    if "the above report" in str(error):
        return "weights are missing or do not fit its config.json"
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading bars and hints belong to an interactive session, not to a worker's log."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
