"""Labels the rows of a CSV file, with a confidence from the logprobs of the label's first token.

python examples/classify_csv.py [IN.csv] [OUT.csv]      IN.csv has the columns id and text
"""

import csv
import math
import subprocess
import sys
from pathlib import Path

from batchjobs import Client

LABELS = ("positive", "negative")
PROMPT = """\
Review: I would buy it again, my family loves it.
Sentiment: positive

Review: It broke at once and smells bad.
Sentiment: negative

Review: {text}
Sentiment:"""


def chances(top):
    """How likely each label is, of the alternatives for one token: (token id, logprob, text)."""
    found = dict.fromkeys(LABELS, 0.0)
    for _, logprob, text in top:
        for label in LABELS:
            if isinstance(text, str) and text.strip() and label.startswith(text.strip().lower()):
                found[label] += math.exp(logprob)
    total = sum(found.values())
    return {label: chance / total if total else 0.0 for label, chance in found.items()}


def main(source, target):
    with open(source, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = ({"custom_id": row["id"], "prompt": PROMPT.format(text=row["text"])} for row in rows)
    with Client() as client, open(target, "w", newline="", encoding="utf-8") as file:
        batch = client.submit(lines, max_tokens=1, temperature=0, top_logprobs=20, name="reviews")
        subprocess.run([sys.executable, "-m", "batchjobs", "worker", "--burst"], check=True)
        batch.wait(timeout=600)
        table = csv.writer(file)
        table.writerow(["id", "label", "confidence", "text"])
        for row, result in zip(rows, batch.results(), strict=True):
            found = chances(result.top_logprobs[0]) if result.top_logprobs else {"failed": 0.0}
            label = max(found, key=found.get)
            table.writerow([row["id"], label, f"{found[label]:.3f}", row["text"]])
            print(f"{row['id']:<4}{label:<10}{found[label]:.3f}  {row['text']}")
    print(f"written to {target}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else Path(__file__).with_name("reviews.csv"), given[1] if len(given) > 1 else "labels.csv")
