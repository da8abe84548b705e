"""clipctl search"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipctl.cli import options, output
from clipctl.cli.commands.embed import show_bad, work_kept
from clipctl.cli.views.paths import shown
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from clipctl.inference.embedder import Embedder
    from clipctl.inference.embedding_store import EmbeddingStore, Manifest
    from clipctl.progress import Count, Tell


def search(
    index: options.Index,
    queries: options.Queries,
    model: options.ModelOf = None,
    top: options.Top = 10,
    minus: options.Minus = None,
    threshold: options.Threshold = None,
    sheet: options.Sheet = None,
    device: options.DeviceOf = "cpu",
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Find pictures by words, or by a picture."""
    from clipctl.data.sheet import check_sheet

    if not all(query.strip() for query in (*queries, *(minus or ()))):
        raise ConfigError("the query is empty", "say what to look for, such as: a red boat")
    if sheet:
        check_sheet(sheet)
    with output.stops_said(), output.counting("embedding", "loading the model") as (tell, progress):
        from clipctl.inference.library import embed_queries
        from clipctl.inference.search import nearest, without

        queries = list(dict.fromkeys(queries))
        store, embedder = opened(index, model, device, runs_dir, tell, progress)
        wanted = embed_queries(embedder, queries)
        if minus:
            wanted = without(wanted, embed_queries(embedder, minus))
        found = nearest(store, wanted, top, threshold)
    results = [
        {"query": query, "rank": rank, "path": store.picture(int(row)).path, "score": round(float(score), 6)}
        for query, rows, scores in zip(queries, found.rows, found.scores, strict=True)
        for rank, (row, score) in enumerate(zip(rows, scores, strict=True), start=1)
    ]
    if sheet and results:
        write_results(results, store.manifest, sheet)
        output.prose().print(f"wrote {sheet}", markup=False)
    if json:
        output.print_json("search", {"index": str(store.path), "pictures": len(store), "results": results})
    else:
        show_results(queries, results, threshold)


def opened(
    index: Path, model: str | None, device: str, runs_dir: str | None, tell: "Tell", progress: "Count"
) -> "tuple[EmbeddingStore, Embedder]":
    """An index and the model it was made with. A folder of pictures gets an index in the application directory."""
    from clipctl.errors import DataError
    from clipctl.inference.embedder import load
    from clipctl.inference.embedding_store import EmbeddingStore, is_store
    from clipctl.inference.library import model_of
    from clipctl.inference.private import private_index

    if is_store(index):
        store = EmbeddingStore.open(index)
        return store, model_of(store, model, runs_dir=runs_dir, device=device)
    if not index.exists():
        raise DataError(
            f"no such file or directory: {index}", "pass an index of embeddings, or a folder of pictures and --model"
        )
    if model is None:
        place = shlex.quote(str(index))
        raise DataError(
            f"{index} is not an index of embeddings",
            f"search its pictures with --model MODEL, or make an index: clipctl embed MODEL {place} -o INDEX",
        )
    embedder = load(model, runs_dir=runs_dir, device=device)
    with work_kept():
        store, bad = private_index(str(index), embedder, tell, progress)
    show_bad(bad)
    return store, embedder


def show_results(queries: list[str], results: list[dict[str, Any]], threshold: float | None) -> None:
    answer = output.data()
    for query in queries:
        if len(queries) > 1:
            answer.print(output.plain(query, style="bold"), soft_wrap=True)
        mine = [one for one in results if one["query"] == query]
        for one in mine:
            answer.print(output.plain(f"{one['score']:6.3f}  {shown(one['path'])}"), soft_wrap=True)
        if not mine:
            answer.print(output.plain("no pictures" if threshold is None else "nothing above the threshold"))


def write_results(results: list[dict[str, Any]], manifest: "Manifest", sheet: Path) -> None:
    """A contact sheet, best matches first."""
    from functools import partial

    from clipctl.data.formats.rows import Hints
    from clipctl.data.sheet import Cell, write_sheet
    from clipctl.inference.gallery import Originals

    originals = Originals(manifest.places, Hints(**manifest.hints))
    cells = [
        Cell(partial(originals.square, one["path"]), f"{one['score']:.3f} {one['query']}", Path(one["path"]).name)
        for one in results
    ]
    write_sheet(cells, sheet)
