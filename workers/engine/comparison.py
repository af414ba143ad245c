"""Whether one model's weights can take the place of another's, and whether they are numbers at all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from workers.engine.models import LoadedModel

HARMLESS = frozenset(
    {
        # who saved it, and where
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "tokenizer_class"),
        # what comes with the tokenizer and the generation settings
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        # training, and what a call asks back
        *("initializer_range", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "layerdrop", "router_aux_loss_coef"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "pretraining_tp"),
    }
)
"""Fields of a configuration that change no logit."""

ROUNDING = 1e-6  # of a number of the configuration; a .gguf file holds them in float32


def why_different(running: LoadedModel, new: LoadedModel) -> str | None:
    """What keeps the new weights from taking the running ones' places, in one sentence; None when nothing does."""
    ours, theirs = type(running.model).__name__, type(new.model).__name__
    if ours != theirs:
        return f"its architecture is {theirs}, not {ours}"
    return (
        _config_difference(running.model.config.to_dict(), new.model.config.to_dict())
        or _tensor_difference(weights(running.model), weights(new.model))
        or _tokenizer_difference(running.tokenizer, new.tokenizer)
    )


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that a checkpoint says of a model, each tensor once: tied weights are one. What is derived is left out."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def check_finite(model: PreTrainedModel, source: str) -> None:
    """Raises UsageError with the name of the first weight that holds a NaN or an infinity."""
    for name, tensor in weights(model).items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UsageError(f"{source!r} is broken: its weight {name} holds numbers that are not finite (NaN or inf)")


def _config_difference(ours: dict[str, Any], theirs: dict[str, Any], path: str = "") -> str | None:
    for name in sorted(ours.keys() | theirs.keys()):
        if name in HARMLESS or name.startswith("_"):
            continue
        mine, its = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(its, dict):
            found = _config_difference(mine, its, f"{path}{name}.")
        elif _is_same(mine, its):
            found = None
        else:
            found = f"its configuration has {path}{name} {_short(its)}, not {_short(mine)}"
        if found:
            return found
    return None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=ROUNDING)
    return bool(one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _tensor_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str | None:
    if missing := sorted(ours.keys() - theirs.keys()):
        return f"it has no weight {missing[0]}"
    if more := sorted(theirs.keys() - ours.keys()):
        return f"it has a weight {more[0]}, which the running model has not"
    for name, mine in ours.items():
        its = theirs[name]
        if its.shape != mine.shape:
            return f"its weight {name} is {tuple(its.shape)}, not {tuple(mine.shape)}"
        if its.dtype != mine.dtype:
            return f"its weight {name} is {its.dtype}, not {mine.dtype}"
    return None


def _tokenizer_difference(ours: PreTrainedTokenizerBase | None, theirs: PreTrainedTokenizerBase | None) -> str | None:
    """Texts must become the same tokens, and tokens the same texts; a chat template may differ."""
    if ours is None or theirs is None:
        if ours is theirs:
            return None
        return "it has no tokenizer" if theirs is None else "it has a tokenizer, and the running model has none"
    mine, its = ours.get_vocab(), theirs.get_vocab()  # added tokens too
    if mine != its:
        token = min(set(mine.items()) ^ set(its.items()), key=lambda pair: (pair[1], pair[0]))[0]
        return f"its vocabulary is another one: {token!r} is {_named(its, token)}, not {_named(mine, token)}"
    if odd := sorted(set(ours.all_special_ids) ^ set(theirs.all_special_ids)):
        return f"its tokenizer does not agree that {theirs.convert_ids_to_tokens(odd[0])!r} is a special token"
    return None


def _named(vocabulary: dict[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "no token"
