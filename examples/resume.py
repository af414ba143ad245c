"""A worker is killed with kill -9 in the middle of a batch; another one goes on. Nothing is generated twice.

python examples/resume.py
"""

import os
import subprocess
import sys
import time

from batchjobs import Client

# A silent worker keeps its work for 15 s, and unfinished answers are stored every 5 s; this example is less patient.
SECONDS = {"LEASE": "4", "HEARTBEAT": "1", "CHECKPOINT": "0.5"}
HURRY = os.environ | {f"BATCHJOBS_{name}_SECONDS": value for name, value in SECONDS.items()}
WORKER = [sys.executable, "-m", "batchjobs", "worker", "--max-requests-per-batch", "4"]


def main():
    prompts = ({"prompt": f"{n} plus {n} is", "max_tokens": 16, "ignore_eos": True} for n in range(24))
    with Client() as client:
        batch = client.submit(prompts, temperature=0, shard_size=4, name="sums")
        first = subprocess.Popen(WORKER, env=HURRY, stderr=subprocess.DEVNULL)
        try:
            while batch.counts.completed < 4 and first.poll() is None:
                time.sleep(0.05)
        finally:
            first.kill()
            first.wait()
        before = {result.index: result.finished_at for result in batch.results()}
        print(f"the first worker was killed: {len(before)} of {batch.counts.total} answered")

        subprocess.run([*WORKER, "--burst"], env=HURRY, stderr=subprocess.DEVNULL, check=True)
        batch.wait(timeout=600)
        after = {result.index: result for result in batch.results()}
        print(f"a second one went on: {len(after)} of {batch.counts.total} answered")
        again = [index for index, finished_at in before.items() if after[index].finished_at != finished_at]
        print(f"answered twice: {len(again)}")
        went_on = [result for result in after.values() if len({span.worker for span in result.version_spans}) > 1]
        print(f"begun by the first worker and finished by the second: {len(went_on)}")


if __name__ == "__main__":
    main()
