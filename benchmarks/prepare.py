"""Preparing a corpus against plain tiktoken on the same bytes and cores, and the memory it takes.

python -m benchmarks.prepare [--megabytes 100] [--kind txt] [--tokenizer FOLDER] [--workers 2]

A corpus of made-up words is written once; then rounds of `prepare()` and of tiktoken alone are
interleaved. tiktoken gets the texts ready in memory, in as many processes, and only its own calls
are timed. CPU seconds stand beside the wall's, since they hardly move with what else is running.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt.bench.output import machine_facts, machine_line
from gpt.bench.rounds import Timing

POOL = 500_000
"""Words that the documents are stretches of."""

KINDS = ("txt", "jsonl", "csv", "parquet", "jsonl.gz", "jsonl.zst")


def words(seed: int = 0, count: int = 60_000) -> list[str]:
    """Made-up words, the frequent ones short, some with accents or in another script."""
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfghklmnprstvwy" for b in ("a", "e", "i", "o", "u", "an", "er")]
    found = []
    choices = rng.integers(0, len(syllables), (count, 6)).tolist()
    for rank, choice in enumerate(choices):
        size = 1 + int(np.log10(rank + 1)) // 2 + choice[5] % 3
        word = "".join(syllables[i] for i in choice[:size])
        if rank % 50 == 7:
            word = word.replace("a", "é")
        if rank % 400 == 11:
            word = "".join(map(chr, rng.integers(0x4E00, 0x9000, 3)))
        found.append(word)
    return found


def documents(megabytes: float, seed: int = 0) -> Iterator[str]:
    """Documents of 50 to 5,000 characters whose words follow Zipf's law."""
    rng = np.random.default_rng(seed)
    marks = ["", "", "", "", "", "", ",", "."]
    known = [" " + word + mark for word in words() for mark in marks]
    shares = np.cumsum(1 / np.arange(1, len(known) // len(marks) + 1) ** 1.05)
    ranks = np.searchsorted(shares, rng.random(POOL) * shares[-1])
    picked = ranks * len(marks) + rng.integers(0, len(marks), POOL)
    pool = [known[i] for i in picked.tolist()]
    left = megabytes * 1e6
    while left > 0:
        sizes = np.exp(rng.uniform(np.log(10), np.log(1000), 1000)).astype(int)
        starts = rng.integers(POOL - 1000, size=1000)
        for size, at in zip(sizes.tolist(), starts.tolist(), strict=True):
            text = f"{at}:" + "".join(pool[at : at + size])
            left -= len(text.encode())
            yield text
            if left <= 0:
                return


def write_corpus(path: Path, kind: str, megabytes: float) -> int:
    """Write the corpus; returns its bytes of text."""
    size = 0

    def counted() -> Iterator[str]:
        nonlocal size
        for text in documents(megabytes):
            size += len(text.encode())
            yield text

    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
        with pq.ParquetWriter(path, schema) as writer:
            rows: list[str] = []
            for text in counted():
                rows.append(text)
                if len(rows) == 20_000:
                    writer.write_table(pa.table([range(len(rows)), rows], schema=schema))
                    rows = []
            writer.write_table(pa.table([range(len(rows)), rows], schema=schema))
        return size
    if kind.endswith((".gz", ".zst")):
        import pyarrow as pa

        stream: Any = pa.output_stream(str(path), "gzip" if kind.endswith("gz") else "zstd")
    else:
        stream = open(path, "wb")  # noqa: SIM115 (either of two)
    with stream:
        if kind == "csv":
            stream.write(b"id,text\n")
        for i, text in enumerate(counted()):
            if kind == "txt":
                line = text + "\n\n"
            elif kind == "csv":
                line = f'{i},"{text}"\n'
            else:
                line = json.dumps({"id": i, "text": text}, ensure_ascii=False) + "\n"
            stream.write(line.encode())
    return size


PREPARE = """
import sys
from gpt.data.prepare import prepare
source, root, tokenizer, workers = sys.argv[1:]
prepare(source, root=root, tokenizer=tokenizer, workers=int(workers), progress=False)
"""

PLAIN = """
import sys, time
from benchmarks.prepare import documents
from gpt.encodings import named_tokenizer
tokenizer, megabytes, share, of, whole = sys.argv[1:]
encoding = named_tokenizer(tokenizer).encoding
texts = [t for i, t in enumerate(documents(float(megabytes))) if i % int(of) == int(share)]
if whole == "txt":  # one long text comes in pieces of the size that preparing uses
    joined = "\\n\\n".join(texts)
    texts = [joined[i : i + (1 << 18)] for i in range(0, len(joined), 1 << 18)]
print("ready", flush=True)
sys.stdin.readline()
wall, cpu = time.perf_counter(), time.process_time()
for text in texts:
    encoding.encode_ordinary(text)
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def resident(pid: int) -> int:
    """Bytes resident in a process and all below it; shared pages count in each."""
    total = 0
    try:
        for one in tree(pid):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    except OSError:  # one has just ended
        pass
    return total * resource.getpagesize()


def prepare_once(path: Path, tokenizer: str, workers: int) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak bytes of one `prepare()` in a process of its own."""
    with tempfile.TemporaryDirectory(dir=path.parent) as root:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(path), root, tokenizer, str(workers)]
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.02)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process.returncode == 0
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, peak


def plain_once(tokenizer: str, megabytes: float, workers: int, kind: str) -> tuple[float, float]:
    """Wall and CPU seconds of tiktoken alone: the slowest process, and all together."""
    team = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN, tokenizer, str(megabytes), str(i), str(workers), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(workers)
    ]
    for process in team:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers: list[list[float]] = []

    def finish(process: subprocess.Popen[str]) -> None:
        answers.append([float(word) for word in process.communicate("go\n")[0].split()])

    threads = [threading.Thread(target=finish, args=(process,)) for process in team]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100, help="of text")
    parser.add_argument("--kind", choices=KINDS, default="txt")
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="a name or a folder; default: a BPE of 4,096 learned from the first 5 MB",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-plain", action="store_true", help="measure preparing alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prepare-") as folder:
        path = Path(folder) / f"corpus.{args.kind}"
        size = write_corpus(path, args.kind, args.megabytes)
        tokenizer = args.tokenizer
        if tokenizer is None:
            from gpt.tokenizer import Tokenizer

            tokenizer = str(Path(folder) / "tokenizer.json")
            Tokenizer.bpe(documents(5), 4096).save(tokenizer)
        print(machine_line(machine_facts()))
        print(
            f"{size / 1e6:,.0f} MB of text in {path.stat().st_size / 1e6:,.0f} MB of {args.kind}, "
            f"{args.workers} workers"
        )
        ours, plain = [], []
        for _ in range(args.rounds):
            ours.append(prepare_once(path, tokenizer, args.workers))
            if not args.no_plain:
                plain.append(plain_once(tokenizer, args.megabytes, args.workers, args.kind))
        wall = Timing([one[0] for one in ours])
        print(f"  prepare()   {wall}  {size / 1e6 / wall.median:.1f} MB/s")
        print(f"  peak memory {max(one[2] for one in ours) / 1e6:,.0f} MB, all processes together")
        if plain:
            alone = Timing([one[0] for one in plain])
            print(f"  tiktoken    {alone}  {size / 1e6 / alone.median:.1f} MB/s")
            cpu = sorted(a[1] / b[1] for a, b in zip(ours, plain, strict=True))
            walls = sorted(a[0] / b[0] for a, b in zip(ours, plain, strict=True))
            print(
                f"  prepare() / tiktoken: {walls[len(walls) // 2]:.2f} of its time "
                f"({walls[0]:.2f} to {walls[-1]:.2f}), {cpu[len(cpu) // 2]:.2f} of its CPU time "
                f"({cpu[0]:.2f} to {cpu[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
