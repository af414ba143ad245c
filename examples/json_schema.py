"""Answers that are held to a JSON schema, token by token, and so can be parsed, whatever the model is.

python examples/json_schema.py
"""

import json
import subprocess
import sys

from batchjobs import Client

CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "legs": {"type": "integer", "minimum": 0, "maximum": 12},
        "lives_in": {"enum": ["water", "air", "land"]},
    },
    "required": ["name", "legs", "lives_in"],
    "additionalProperties": False,
}
ANIMALS = ("cat", "spider", "salmon", "eagle", "ant", "frog")


def question(animal):
    return {
        "custom_id": animal,
        "messages": [{"role": "user", "content": f"Fill in a card about this animal, as JSON: {animal}"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "card", "schema": CARD}},
    }


def main():
    with Client() as client:
        batch = client.submit(map(question, ANIMALS), max_tokens=80, temperature=0, name="cards")
        subprocess.run([sys.executable, "-m", "batchjobs", "worker", "--burst"], check=True)
        batch.wait(timeout=600)
        for result in batch.results():
            if result.finish_reason != "stop":  # cut by max_tokens: no whole JSON
                print(f"{result.custom_id:<8} {result.finish_reason}: {result.error or repr(result.text)}")
                continue
            card = json.loads(result.text)
            print(f"{result.custom_id:<8} {card['legs']:>2} legs, in {card['lives_in']:<6} called {card['name']!r}")


if __name__ == "__main__":
    main()
