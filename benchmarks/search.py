"""How fast an index is searched: a million vectors of 512 dimensions in half precision, on all cores.

    python benchmarks/search.py [--pictures 1000000] [--dimensions 512] [--queries 12]

Beside it, in the same run: numpy on float32 vectors that are all in memory. The memory of a search is what it needs
beyond the vectors, which are mapped: anonymous memory, as the system counts it.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from clipctl.hardware import cpu
from clipctl.inference import embedding_store as stores
from clipctl.inference.search import nearest

TOP = 10


def make_store(path, pictures, dimensions):
    """Random directions, written block by block."""
    facts = stores.ModelFacts("benchmark", "benchmark", "0" * 64, dimensions)
    rng = np.random.default_rng(0)
    manifest = stores.Manifest(1, facts, pictures, "float16", ["/"])
    with (path / manifest.vectors_file).open("wb") as stream:
        header = {"descr": "<f2", "fortran_order": False, "shape": (pictures, dimensions)}
        np.lib.format.write_array_header_1_0(stream, header)
        for start in range(0, pictures, 10_000):
            block = rng.standard_normal((min(10_000, pictures - start), dimensions), dtype=np.float32)
            block /= np.linalg.norm(block, axis=1, keepdims=True)
            stream.write(block.astype(np.float16).tobytes())
    with (path / manifest.pictures_file).open("w") as file:
        for row in range(pictures):
            file.write(json.dumps({"path": f"/photos/{row:08d}.jpg", "size_bytes": 1, "changed": 1}) + "\n")
    (path / manifest.bad_file).write_text("")
    (path / stores.MANIFEST).write_text(json.dumps(manifest.to_dict()))
    return stores.EmbeddingStore.open(path)


def anonymous_bytes():
    """Memory of this process that is not a mapped file; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1_000_000)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--queries", type=int, default=12)
    asked = parser.parse_args()
    torch.set_num_threads(cpu.usable_cores())
    with tempfile.TemporaryDirectory() as place:
        store = make_store(Path(place), asked.pictures, asked.dimensions)
        rng = np.random.default_rng(1)
        queries = rng.standard_normal((asked.queries, 1, asked.dimensions), dtype=np.float32)
        queries /= np.linalg.norm(queries, axis=2, keepdims=True)
        before = anonymous_bytes()
        times, found = [], []
        for query in queries:
            started = time.perf_counter()
            found.append(nearest(store, query, TOP).rows[0])
            times.append(time.perf_counter() - started)
        after = anonymous_bytes()
        whole = np.asarray(store.vectors).astype(np.float32)
        numpy_times, differ = [], 0
        for query, rows in zip(queries, found, strict=True):
            started = time.perf_counter()
            scores = whole @ query[0]
            best = np.argpartition(-scores, TOP)[:TOP]
            best = best[np.argsort(-scores[best], kind="stable")]
            numpy_times.append(time.perf_counter() - started)
            differ += not np.allclose(scores[best], scores[rows], atol=1e-6)
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{asked.pictures:,} × {asked.dimensions}, float16, {asked.queries} queries, {TOP} results each")
    print(f"first query {times[0]:.2f} s, then {statistics.median(times[1:]):.3f} s (up to {max(times[1:]):.3f} s)")
    print(f"numpy, float32 in memory: {statistics.median(numpy_times[1:]):.3f} s")
    print(f"queries whose results differ from brute force: {differ}")
    if before is not None and after is not None:
        print(f"memory beyond the mapped vectors: {(after - before) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
