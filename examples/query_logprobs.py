"""How sure was the model? Questions in SQL to the tokens of a batch.

python examples/query_logprobs.py
"""

import subprocess
import sys

from batchjobs import Client

QUESTIONS = (
    "What is the capital of France?",
    "Who was the first person on the moon?",
    "What is the capital of Burkina Faso?",
    "How many legs does a spider have?",
    "What is seven times eight?",
    "Name a river in Peru.",
)
ANSWERS = """
SELECT r.custom_id, count(*) AS tokens, exp(-avg(t.logprob)) AS perplexity, min(t.logprob) AS least, r.text
FROM results AS r
JOIN completion_tokens AS t ON t.batch_id = r.batch_id AND t."index" = r."index"
WHERE r.batch_id = '{batch}'
GROUP BY r.custom_id, r.text
ORDER BY perplexity DESC
"""
DOUBTS = """
SELECT r.custom_id, t.position, t.token, t.logprob
FROM completion_tokens AS t
JOIN results AS r ON r.batch_id = t.batch_id AND r."index" = t."index"
WHERE t.batch_id = '{batch}'
ORDER BY t.logprob, r.custom_id, t.position
"""


def main():
    lines = ({"custom_id": f"q{n}", "messages": [{"role": "user", "content": q}]} for n, q in enumerate(QUESTIONS))
    with Client() as client:
        batch = client.submit(lines, max_tokens=24, temperature=0, name="questions")
        subprocess.run([sys.executable, "-m", "batchjobs", "worker", "--burst"], check=True)
        batch.wait(timeout=600)
        print("answers, the least certain first")
        for row in client.query(ANSWERS.format(batch=batch.id)):
            print(
                f"  {row['custom_id']}  perplexity {row['perplexity']:8.2f}  {row['tokens']:>3} tokens  {row['text']!r}"
            )
        print("the five least likely tokens")
        for row in client.query(DOUBTS.format(batch=batch.id), limit=5):
            print(f"  {row['custom_id']}  token {row['position']:>2}  logprob {row['logprob']:7.3f}  {row['token']!r}")


if __name__ == "__main__":
    main()
