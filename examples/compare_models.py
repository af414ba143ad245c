"""The same prompts under two versions of a model: where they agree, and how sure each of them is.

python examples/compare_models.py [MODEL [OTHER]]      without OTHER: MODEL rounded to 8 bits, on the spot
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from batchjobs import Client, load_settings
from batchjobs.models import resolve_model

PROMPTS = ("The sky is", "Two and two make", "A cat is an", "Water boils at", "The opposite of hot is", "We bake bread")
AGREEMENT = """
WITH sure AS (SELECT batch_id, "index", avg(logprob) AS mean FROM completion_tokens
              WHERE batch_id IN ('{a}', '{b}') GROUP BY batch_id, "index")
SELECT a.prompt, a.text AS text_a, b.text AS text_b, a.text = b.text AS agree, x.mean AS sure_a, y.mean AS sure_b
FROM results AS a JOIN sure AS x ON x.batch_id = a.batch_id AND x."index" = a."index"
JOIN results AS b ON b."index" = a."index" JOIN sure AS y ON y.batch_id = b.batch_id AND y."index" = b."index"
WHERE a.batch_id = '{a}' AND b.batch_id = '{b}' ORDER BY a."index"
"""


def rounded(model, folder):
    """Saves the model in ``folder``, its weights rounded to 8 bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    source = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (model, {})
    copy = AutoModelForCausalLM.from_pretrained(source[0], **source[1])
    copy.hf_quantizer = None  # of a .gguf file: its weights are plain numbers here
    vars(copy.config).pop("quantization_config", None)
    for weights in copy.parameters():
        weights.data = weights.data.to(torch.float8_e4m3fn).to(weights.dtype)
    copy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source[0], **source[1]).save_pretrained(folder)
    return folder


def answer(client, model):
    batch = client.submit(({"prompt": prompt} for prompt in PROMPTS), model=model, max_tokens=2, temperature=0)
    subprocess.run([sys.executable, "-m", "batchjobs", "worker", "--burst", "--model", model], check=True)
    batch.wait(timeout=600)
    print(f"answered by {batch.result(0).model_version}")
    return batch.id


def main(model, other):
    with Client() as client, tempfile.TemporaryDirectory() as folder:
        a, b = answer(client, model), answer(client, other or rounded(model, folder))
        rows = list(client.query(AGREEMENT.format(a=a, b=b)))
    for row in rows:
        print(f"{'=' if row['agree'] else '!'} {row['prompt']}")
        print(f"    {row['sure_a']:7.3f} {row['text_a']!r}\n    {row['sure_b']:7.3f} {row['text_b']!r}")
    print(f"they agree on {sum(bool(row['agree']) for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    given = [*sys.argv[1:], None, None]
    main(resolve_model(given[0] or load_settings().model), given[1])
