"""A ``.gguf`` file as a model folder, converted once.

transformers reads a GGUF file several times over in pure Python: half a minute for the 100 MB of a 135M model. The
dequantised weights, the configuration and the tokenizer are therefore kept as an ordinary model folder in the cache,
named by the file's content, from which loading takes a second or two. The weights are the same bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchjobs.errors import UsageError
from workers.engine.folders import cache_folder
from workers.engine.weights import check_weights

log = logging.getLogger(__name__)

ROPE_FACTORS = ("rope_freqs", "rope_factors")  # tensors
GROWTH = 10  # converted weights are float32: at most about this many times the size of a quantised file


def converted(file: Path) -> Path:
    """The folder that holds this file's model; made on first use. Several processes may ask at once."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{file.stem}-{digest[:16]}"
    if not (folder / "config.json").is_file():
        _convert(file, folder)
    return folder


def why_not(file: Path) -> str | None:
    """Why the cache cannot take the converted model; None when it can."""
    folder = cache_folder() / "models"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"the cache folder {folder} cannot be used ({error.strerror}); set BATCHJOBS_CACHE to another"
    if not os.access(folder, os.W_OK):
        return f"the cache folder {folder} cannot be written; set BATCHJOBS_CACHE to another"
    if free < 2 * GROWTH * file.stat().st_size:
        return f"the disk of {folder} has too little room; set BATCHJOBS_CACHE to a folder on another"
    return None


def check_rope(file: Path) -> None:
    """Refuse a file whose RoPE is scaled in a way that transformers does not read from GGUF files.

    Raises:
        UsageError: The model would run with the frequencies of another one.
    """
    from gguf import GGUFReader  # here, because a file that was converted before needs no look into it

    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    kind = reader.fields.get(f"{architecture}.rope.scaling.type")
    scaled = kind is not None and kind.contents() != "none" and architecture != "gpt-oss"
    factors = [t.data for t in reader.tensors if t.name.startswith(ROPE_FACTORS)]
    if scaled or any((factor != 1).any() for factor in factors):
        raise UsageError(
            f"{file.name} scales its RoPE, which transformers does not read from a .gguf file: its answers would be "
            "wrong; take the model's folder with its .safetensors files instead"
        )


def _convert(file: Path, folder: Path) -> None:
    log.warning("converting %s once into %s", file.name, folder)
    check_rope(file)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        model, report = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        check_weights(report, file.name)
        # The weights are plain now: what said that they were quantised must not travel on.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(**where).save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first, with the same content
                raise
