"""Mutated files for every reader of what may come from elsewhere.

python -m tests.faults.fuzz READER [--count 10000] [--seed 0]     prints what was found, as JSON
python -m tests.faults.fuzz READER --atheris SECONDS              guided by coverage, if atheris is installed

A reader may read the file, or refuse it in words. Anything else is a finding: another exception, more than two seconds
of computing, more than 200 MB above the start, a file opened for writing or deleted outside its directory, or a file
read outside of it that is no part of Python.
"""

import argparse
import faulthandler
import io
import json
import os
import random
import shutil
import struct
import sys
import sysconfig
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clipctl.files import write_sealed

LIMIT_S, LIMIT_BYTES = 2.0, 200e6
FORBIDDEN = ("subprocess", "socket", "os.exec", "os.system", "pickle.find_class", "ctypes.dlopen")
HANG_S = 60  # then the process is ended, with a traceback

ODD_VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1e308, -1e308, 0.1, float("nan"), float("inf")),
    *("", "x", "\0", "../../etc/passwd", "/dev/zero", "\ud800", "\u202e", "a" * 5000, "9" * 400, "null", "[red]"),
    *([], {}, [[]], {"": {}}, [None] * 50, {"a": [1, {"b": 2}]}, [1e400]),
]
ODD_BYTES = [
    *(
        b"\0",
        b"\xff" * 4,
        b"\x00" * 16,
        b"-1",
        b"99999999999999999999",
        b"1e999",
        b"NaN",
        b"{",
        b"[" * 3000,
        b'"',
        b"\n",
    ),
    *(b"\r", b"&a *a", b"<<: *a", b"\xef\xbb\xbf", b"\xff\xfe", b"../", b"/etc/passwd", b"%s%n", b"\x1b[2J", b","),
    *(struct.pack("<Q", 2**63), struct.pack(">I", 2**31 - 1), b"\x80" + bytes(11)),
]


# --- mutations ------------------------------------------------------------------------------------------------


def mutate(content: bytes, rng: random.Random) -> bytes:
    """A few small changes to bytes, or one to a JSON document."""
    if content[:1] in (b"{", b"[") and rng.random() < 0.5:
        with suppress(ValueError, RecursionError):
            return mutate_json(content, rng)
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        _mutate_once(changed, rng)
    return bytes(changed)


def _mutate_once(content: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(content) + 1)
    length = min(len(content) - place, rng.choice((1, 1, 2, 4, 8, 64, 512)))
    match rng.randrange(7):
        case 0 if content:
            content[place % len(content)] ^= 1 << rng.randrange(8)
        case 1 if content:
            content[place % len(content)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        case 2:
            del content[place:]
        case 3:
            del content[place : place + length]
        case 4:
            content[place:place] = rng.choice(ODD_BYTES)
        case 5:
            content[place : place + length] = rng.choice(ODD_BYTES)
        case _:
            content[place:place] = content[place : place + length] * rng.choice((1, 2, 50))


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """One value of a document (or of one of its lines) replaced, moved, doubled or taken out."""
    lines = content.split(b"\n") if b"\n{" in content else [content]
    number = rng.randrange(len(lines))
    document = json.loads(lines[number])
    places = list(_places(document))
    if not places:
        return content
    holder, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.7:
        holder[key] = rng.choice(ODD_VALUES)
    elif kind < 0.8:
        del holder[key]
    elif kind < 0.9:
        other, place = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[place]))
    elif isinstance(holder, dict):
        holder[str(rng.choice(ODD_VALUES))[:50]] = holder[key]
    else:
        holder += holder[:20]
    lines[number] = json.dumps(document).encode(errors="surrogatepass")
    return b"\n".join(lines)


def _places(value: Any) -> "list[tuple[Any, Any]]":
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value[:30]))
    else:
        return []
    return [(value, key) for key, _ in inner] + [place for _, one in inner for place in _places(one)]


# --- readers --------------------------------------------------------------------------------------------------


class Reader:
    """`seeds` are files as they should be; `read` gets a directory in which `name` was written, and returns False if
    what was written did not reach the parser. A table of captions may name any file of the user: that is opened, as a
    picture. A sealed document gets its checksum after it was changed: else that would be all that is ever looked at."""

    def __init__(
        self,
        name: str,
        seeds: Sequence[bytes],
        read: Callable[[Path], object],
        *,
        names_files: bool = False,
        is_sealed: bool = False,
    ) -> None:
        self.name, self.seeds, self.read, self.names_files = name, seeds, read, names_files
        self._is_sealed = is_sealed

    def write(self, home: Path, content: bytes) -> None:
        """As the reader will find it."""
        (home / self.name).parent.mkdir(parents=True, exist_ok=True)
        if self._is_sealed:
            with suppress(ValueError, RecursionError):
                document = json.loads(content)
                if isinstance(document, dict):
                    document.pop("sha256", None)
                    write_sealed(home / self.name, document)
                    return
        (home / self.name).write_bytes(content)

    def check_seeds(self, home: Path) -> None:
        """As they are, they are read; and all that is needed for that is loaded then."""
        for content in self.seeds:
            self.write(home, content)
            assert self.read(home) is not False, f"{self.name}: what is mutated is refused before it is parsed"


def make_reader(kind: str, home: Path) -> Reader:
    return READERS[kind](home)


def run_seed(home: Path) -> Path:
    """A run as a training leaves it, made without one."""
    from clipctl.config.layers import Layer, resolve, to_yaml
    from clipctl.runs.metrics import MetricsWriter
    from clipctl.runs.retrieval import Near, Query, Retrieval
    from clipctl.runs.rundir import RunDir
    from tests.conftest import MICRO

    run = RunDir.create(home, "tiny", "run")
    run.write_config(to_yaml(resolve([Layer("fuzz", MICRO)])))
    run.write_environment(
        {
            "loss_floor": 0.1,
            "seen_captions": 0.5,
            "memory_bytes": 2**34,
            "device": {"name": "cpu"},
            "threads": {"value": 1},
        }
    )
    run.write_status("finished", attempt=1, step=24, total_steps=24)
    near = (Near(0, 0.4, True), Near(1, 0.3, False))
    run.write_retrieval(Retrieval(16, 24, (Query("a red boat", 1, 3, near), Query("two cats", 5, None, near))))
    run.write_thumbnails(bytes(2 * 16 * 16 * 3))
    writer = MetricsWriter(run.metrics_file, "run")
    for step in range(1, 25):
        row = {"step": step, "epoch": 1 + step // 8, "loss": 3.0 / step, "lr": 1e-3, "step_s": 0.1, "accuracy": 0.5}
        writer.write("step", {**row, "grad_norm": 1.0, "temperature": 0.07, "images_per_s": 90.0})
        if step % 8 == 0:
            scores = dict.fromkeys(("i2t_r1", "i2t_r5", "t2i_r1", "t2i_r5", "val_loss", "score"), 0.5)
            writer.write(
                "epoch", {"epoch": step // 8, "step": step, "loss": 1.0, "grad_norm_by_block": {"image.0": 1.0}}
            )
            writer.write("eval", {"step": step, "epoch": step // 8, **scores})
            writer.write("checkpoint", {"step": step, "path": f"step-{step:08d}", "size_bytes": 9, "save_s": 0.1})
    writer.write("system", {"cpu_per_core": [0.5, 0.5], "rss_bytes": 10**8, "disk_free_bytes": 10**9})
    writer.write("event", {"step": 3, "event": "bad_picture", "message": "x: damaged", "counts": {"damaged": 1}})
    writer.write("resume", {"step": 16, "attempt": 2})
    writer.write("end", {"state": "finished", "step": 24, "lost_rows": 0})
    writer.close()
    run.release()
    return run.path


def _watched(name: str) -> Callable[[Path], Reader]:
    def make(home: Path) -> Reader:
        from clipctl.cli.views.dashboard import dashboard
        from clipctl.cli.views.scene import PAGES, Options, Scene
        from clipctl.monitor.runs import run_rows
        from clipctl.monitor.watch import RunWatcher
        from clipctl.runs.rundir import RunDir

        path = run_seed(home)

        def read(directory: Path) -> None:
            run = RunDir(directory)
            for _ in range(2):
                snapshot = RunWatcher(run).look(time.monotonic())
                json.dumps(snapshot.to_dict(), default=str)
                for page in range(len(PAGES)):
                    dashboard(Scene(snapshot, Options(page=page, pictures=True)), 120, 36)
                    dashboard(Scene(snapshot, Options(page=page, log=True, zoom=2, scroll=1, colours=None)), 60, 16)
                dashboard(Scene(snapshot), 40, 8)
            list(run_rows(directory.parent))

        return _in_run(name, path, read)

    return make


def _in_run(name: str, path: Path, read: Callable[[Path], None]) -> Reader:
    return Reader(f"{path.name}/{name}", [(path / name).read_bytes()], lambda home: read(home / path.name))


def _config(home: Path) -> Reader:
    from clipctl.config.layers import load_yaml, resolve

    path = run_seed(home)
    texts = [(path / "config.yaml").read_bytes(), b"preset: small\ntrain: {epochs: 3}\noptim:\n  lr: 1e-3\n"]
    return Reader("config.yaml", texts, lambda directory: resolve([load_yaml(directory / "config.yaml")]))


def checkpoint_seed(home: Path) -> Any:
    """A checkpoint with a model of the smallest size."""
    import torch

    from clipctl.config.layers import Layer, resolve
    from clipctl.data.tokenizers import CharacterTokenizer
    from clipctl.model.clip import Clip
    from clipctl.model.weights import TrainedModel, save_model
    from clipctl.training.course import Course
    from clipctl.training.evaluate import Evaluation
    from tests.conftest import MICRO

    torch.set_num_threads(1)
    tokenizer = CharacterTokenizer("abc ", 20)
    values = {**MICRO, "model.text.vocab_size": tokenizer.vocab_size, "model.text.context": 20}
    config = resolve([Layer("fuzz", values)])
    scores = Evaluation(1.0, *[0.5] * 6, 0.5, None, 0.5)
    course = Course(evaluated_epochs=2, evaluation=scores, best=scores, bad_pictures={"a": "damaged"}).to_dict()
    model = TrainedModel(Clip(config.model, loss="softmax"), config, tokenizer.to_dict())
    return save_model(model, home / "checkpoint", name="fuzz", facts={"step": 0, **course})


def _manifest(home: Path) -> Reader:
    from clipctl.runs.checkpoint import MANIFEST, read_checkpoint

    made = checkpoint_seed(home)

    def read(directory: Path) -> None:
        checkpoint = read_checkpoint(directory / "checkpoint")
        checkpoint.gross_problems()
        checkpoint.problems()

    return Reader(f"checkpoint/{MANIFEST}", [(made.path / MANIFEST).read_bytes()], read)


def _vouched(name: str) -> Callable[[Path], Reader]:
    """A file of a checkpoint whose manifest has the right sum, as whoever forged it would see to."""

    def make(home: Path) -> Reader:
        from clipctl.model.weights import load_model
        from clipctl.runs.checkpoint import read_checkpoint
        from clipctl.runs.inventory import checkpoint_document
        from clipctl.training.saver import read_course
        from tests.faults.test_hostile import vouch

        made = checkpoint_seed(home)

        def read(directory: Path) -> None:
            from clipctl.data import tokenizers
            from clipctl.errors import ClipctlError

            vouch(read_checkpoint(directory / "checkpoint"), name)
            checkpoint = read_checkpoint(directory / "checkpoint")
            problem = None
            for look in (checkpoint_document, read_course, lambda one: tokenizers.from_dict(load_model(one).tokenizer)):
                try:
                    look(checkpoint)
                except ClipctlError as error:
                    problem = error
            if problem:
                raise problem

        return Reader(f"checkpoint/{name}", [(made.path / name).read_bytes()], read)

    return make


def _header(home: Path) -> Reader:
    from clipctl.runs.checkpoint import MODEL
    from clipctl.runs.tensors import read_header
    from clipctl.runs.values import nonfinite_counts

    made = checkpoint_seed(home)

    def read(directory: Path) -> None:
        read_header(directory / "file.safetensors")
        nonfinite_counts(directory / "file.safetensors")

    return Reader("file.safetensors", [(made.path / MODEL).read_bytes()], read)


def _tokenizer(home: Path) -> Reader:
    from clipctl.data.tokenizers import SubwordTokenizer, read_tokenizer

    text = SubwordTokenizer.learn(["a cat", "a dog", "two birds"], 300, 20).to_dict()["definition"]
    return Reader(
        "tokenizer.json",
        [json.dumps(text).encode()],
        lambda directory: read_tokenizer(directory / "tokenizer.json", 20),
    )


def _data(name: str, seeds: Callable[[], Sequence[bytes]]) -> Callable[[Path], Reader]:
    """Data are read as `train` reads them: recognised, indexed, and their captions and pictures looked at."""

    def make(home: Path) -> Reader:
        from clipctl.data.formats.rows import Hints
        from clipctl.data.index.build import build
        from clipctl.data.index.columns import read_index

        for number in range(3):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(home / f"{number}.png")

        def read(directory: Path) -> None:
            with tempfile.TemporaryDirectory(dir=directory) as place:
                build(str(directory / name), Hints(), Path(place), lambda words: None)
                index = read_index(Path(place))
                assert index is not None
                for picture in range(min(len(index), 20)):
                    index.captions(picture)
                    index.label(picture)
                    index.extent(picture, 1000)

        return Reader(name, seeds(), read, names_files=True)

    return make


def _table_seeds() -> list[bytes]:
    rows = [("filepath", "caption"), *((f"{number}.png", f'a "nice", red cat {number}') for number in range(3))]
    quoted = "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
    piped = "\n".join("| ".join(cell.replace('"', "") for cell in row) for row in rows)
    token = "\n".join(f"{number}.png#0\ta red cat {number}" for number in range(3))
    lists = "image\tcaptions\tsplit\n0.png\t['a', 'b']\ttrain\n1.png\t[\"c\"]\tval\n"
    moved = "image,caption\n" + "\n".join(f"C:\\old\\pics\\{number}.png,a cat" for number in range(3))
    return [text.encode() for text in (quoted, piped, token, lists, moved)] + [quoted.encode("utf-16")]


def _document_seeds() -> list[bytes]:
    names = [f"{number}.png" for number in range(3)]
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    coco = {
        "images": images,
        "annotations": [{"image_id": number, "caption": f"a cat {number}"} for number in range(3)],
    }
    split = [{"filename": name, "split": "train", "sentences": [{"raw": "a cat"}]} for name in names]
    blip = [{"image": name, "caption": ["a cat", "a dog"]} for name in names]
    return [json.dumps(document).encode() for document in (coco, {"images": split}, blip, {"data": blip})]


def _line_seeds() -> list[bytes]:
    def lines(home: str) -> bytes:
        rows = [
            {"file_name": f"{home}{number}.png", "text": f"a cat {number}", "split": "train"} for number in range(3)
        ]
        return "\n".join(map(json.dumps, rows)).encode() + b"\n"

    return [lines(""), lines("/old/pics/")]


def _shard_seeds() -> list[bytes]:
    contents = []
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
            for number in range(3):
                long = "x" * 120 if format != tarfile.USTAR_FORMAT else "x"
                for kind, content in (("jpg", b"jpg" * 9), ("txt", b"a cat"), ("json", b'{"caption": "a dog"}')):
                    info = tarfile.TarInfo(f"{long}{number}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        contents.append(stream.getvalue())
    return contents


def _pictures(home: Path) -> Reader:
    from clipctl.data.bad import BadPictureError
    from clipctl.data.decoding import open_picture, picture_size, to_square
    from clipctl.errors import DataError

    rng, seeds = np.random.default_rng(0), []
    colour = Image.fromarray(rng.integers(0, 255, (24, 20, 3), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65535, (24, 20), dtype=np.uint16))
    for picture, format in (
        *((colour, format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")),
        *((deep, "PNG"), (deep, "TIFF"), (colour.convert("RGBA"), "PNG"), (colour.convert("CMYK"), "JPEG")),
        (colour.convert("P"), "PNG"),
    ):
        stream = io.BytesIO()
        picture.save(stream, format)
        seeds.append(stream.getvalue())

    def read(directory: Path) -> None:
        content = (directory / "picture").read_bytes()
        try:
            open_picture(content, 8)
            to_square(open_picture(content), 8)
        except BadPictureError as error:
            raise DataError(str(error)) from None
        finally:
            with suppress(BadPictureError):
                picture_size(content)

    return Reader("picture", seeds, read)


def _profile(home: Path) -> Reader:
    from clipctl.hardware import profile
    from clipctl.hardware.profile import AttentionTimes, DeviceFacts, Machine, Profile, Rates, StepSample
    from clipctl.model.forecast import CostModel
    from clipctl.model.workload import Setting

    machine = Machine("cpu", 2, 24, "Linux", "2.13.0")
    known = Profile(
        machine,
        (DeviceFacts("cpu", "cpu", 2**34),),
        (Rates("cpu", "fp32", 1, 90.0, time.time()),),
        (StepSample("cpu", "fp32", 1, {"batch_size": 3}, 0.1, 0.0, None, time.time()),),
        (AttentionTimes("cpu", "fp32", 1, {"tokens": 9}, 0.1, 0.1, time.time()),),
    )
    os.environ["CLIPCTL_HOME"] = str(home)
    place = profile.profile_file(machine).relative_to(home)

    def read(directory: Path) -> bool:
        os.environ["CLIPCTL_HOME"] = str(directory)
        found = profile.load_profile(machine)
        CostModel(found)
        found.rate("cpu", "fp32", 2)
        found.exact_rate("cpu", "fp32", 1)
        assert Setting("cpu", "fp32", 1)
        return found == known

    return Reader(str(place), [json.dumps(known.to_dict()).encode()], read, is_sealed=True)


def _index(home: Path) -> Reader:
    """The facts of an index in the application directory."""
    from clipctl.data.formats.rows import Hints
    from clipctl.data.index.build import build
    from clipctl.data.index.columns import META, read_index

    Image.new("RGB", (8, 8)).save(home / "0.png")
    (home / "data.csv").write_text("image,caption\n0.png,a cat\n")
    (home / "index").mkdir()
    build(str(home / "data.csv"), Hints(), home / "index", lambda words: None)

    def read(directory: Path) -> bool:
        index = read_index(directory / "index")
        if index:
            index.is_current()
            index.captions(0)
        return index is not None

    return Reader(f"index/{META}", [(home / "index" / META).read_bytes()], read, is_sealed=True)


def _embeddings(name: str) -> Callable[[Path], Reader]:
    """An index that `clipctl embed` made."""

    def make(home: Path) -> Reader:
        from clipctl.inference.embedding_store import EmbeddingStore, Known, ModelFacts, problems_of, write_state
        from clipctl.inference.gallery import PictureId

        vectors = np.eye(3, 4, dtype=np.float16)
        rows = [(PictureId(f"{row}.jpg", 9, 1), Known(vectors, row)) for row in range(3)]
        (home / "index").mkdir()
        write_state(home / "index", ModelFacts("model", "runs/model", "0" * 64, 4), "float16", ["pictures"], rows, [])

        def read(directory: Path) -> bool:
            store = EmbeddingStore.open(directory / "index")
            store.vectors.sum()
            problems_of(directory / "index")
            return len(store.all_pictures()) == 3

        return Reader(f"index/{name}", [(home / "index" / name).read_bytes()], read)

    return make


def _features(home: Path) -> Reader:
    from clipctl.training import features

    entry = features._Entry(np.eye(3, dtype=np.float32), np.arange(3, dtype=np.uint64), {1: "damaged"})
    features._write(home / "features", entry)

    def read(directory: Path) -> bool:
        found = features._read(directory / "features")
        return found is not None and len(found.rows) == 3

    name = f"features/{features.MANIFEST}"
    return Reader(name, [(home / name).read_bytes()], read, is_sealed=True)


def _cache(home: Path) -> Reader:
    """Decoded pictures."""
    from clipctl.data.cache import DiskCache, RamCache
    from clipctl.data.synthetic.scenes import SyntheticSource

    os.environ["CLIPCTL_HOME"] = str(home)
    source = SyntheticSource(3, seed=0, validation=False)
    made = DiskCache(source, 8, 10**6)
    right = [RamCache(source, 8, 0).get(index) for index in range(3)]
    for index in range(3):
        made.get(index)

    def read(directory: Path) -> None:
        os.environ["CLIPCTL_HOME"] = str(directory)
        cache = DiskCache(source, 8, 10**6)
        assert all((cache.get(index) == right[index]).all() for index in range(3)), "other pixels"

    return Reader(str(made.path.relative_to(home)), [made.path.read_bytes()], read)


def _foreign(name: str) -> Callable[[Path], Reader]:
    """The settings beside another library's weights."""

    def make(home: Path) -> Reader:
        from clipctl.config.sections import ModelConfig, TextTowerConfig
        from clipctl.interop import configs
        from clipctl.interop.foreign import Hints, recognise

        model = ModelConfig(text=TextTowerConfig(vocab_size=99))
        documents = {
            "config.json": configs.to_transformers(model, {}),
            "preprocessor_config.json": configs.to_preprocessor(model.image),
            "open_clip_config.json": configs.to_open_clip(model, has_bias=False),
        }
        places = (
            {"open_clip_config.json"}
            if name == "open_clip_config.json"
            else documents.keys() - {"open_clip_config.json"}
        )
        (home / "model").mkdir()
        (home / "model" / "model.safetensors").touch()
        for place in places:
            (home / "model" / place).write_text(json.dumps(documents[place]))

        def read(directory: Path) -> bool:
            return recognise(directory / "model", Hints()).config is not None

        return Reader(f"model/{name}", [json.dumps(documents[name]).encode()], read)

    return make


READERS: dict[str, Callable[[Path], Reader]] = {
    "run.json": _watched("run.json"),
    "metrics.jsonl": _watched("metrics.jsonl"),
    "environment.json": _watched("environment.json"),
    "retrieval.json": _watched("retrieval.json"),
    "run's config.yaml": _watched("config.yaml"),
    "config.yaml": _config,
    "manifest.json": _manifest,
    "state.json": _vouched("state.json"),
    "model.safetensors": _vouched("model.safetensors"),
    "safetensors header": _header,
    "tokenizer.json": _tokenizer,
    "table": _data("data.csv", _table_seeds),
    "JSON lines": _data("data.jsonl", _line_seeds),
    "JSON document": _data("data.json", _document_seeds),
    "tar": _data("data.tar", _shard_seeds),
    "picture": _pictures,
    "machine profile": _profile,
    "index": _index,
    "embeddings": _embeddings("manifest.json"),
    "embeddings' pictures": _embeddings("pictures-00000001.jsonl"),
    "embeddings' vectors": _embeddings("vectors-00000001.npy"),
    "features": _features,
    "picture cache": _cache,
    "transformers' config": _foreign("config.json"),
    "transformers' preprocessor": _foreign("preprocessor_config.json"),
    "open_clip's config": _foreign("open_clip_config.json"),
}


# --- judging --------------------------------------------------------------------------------------------------


class Trace:
    """What is opened, written and deleted while a reader reads."""

    def __init__(self, home: Path) -> None:
        self.home, self.is_on, self.found = str(home), False, list[str]()
        python = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(__file__).parents[2])}
        self._harmless = (*python, "/proc", "/sys", "/dev/null", "/usr/share", "/etc/localtime")
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.path.abspath(os.fsdecode(arguments[0])))
            writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if not path.startswith(self.home) and (writes or not path.startswith(self._harmless)):
                self.found.append(f"{'wrote' if writes else 'read'} {path}")
        elif event in ("os.remove", "os.rmdir") and arguments[1] != -1:
            pass  # within a directory that shutil.rmtree was asked to delete, which is an event of its own
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.symlink", "os.kill"):
            path = os.path.realpath(os.path.abspath(str(arguments[0]))) if event != "os.kill" else str(arguments)
            if event == "os.kill" or not path.startswith(self.home):
                self.found.append(f"{event} {path}")
        elif event.startswith(FORBIDDEN) and event != "socket.gethostname":
            self.found.append(event)


def memory_bytes(what: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))


def fuzz(kind: str, count: int, seed: int) -> dict[str, Any]:
    """Read `count` mutated files; what was found, the slowest, and the memory they took."""
    from clipctl.errors import ClipctlError

    warnings.simplefilter("ignore")
    home = Path(tempfile.mkdtemp(prefix="clipctl-fuzz-")).resolve()
    reader, rng, trace = make_reader(kind, home), random.Random(f"{kind} {seed}"), Trace(home)
    findings, refused, slowest_s = [], 0, 0.0
    reader.check_seeds(home)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark of memory starts from here
    before_bytes = memory_bytes("VmRSS") if sys.platform == "linux" else 0
    for number in range(count):
        content = mutate(rng.choice(reader.seeds), rng)
        reader.write(home, content)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        started_s, trace.is_on = time.process_time(), True
        problem = None
        try:
            reader.read(home)
        except ClipctlError as error:
            refused += 1
            if len(str(error)) > 5000:
                problem = f"a message of {len(str(error))} characters"
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        trace.is_on = False
        taken_s = time.process_time() - started_s
        slowest_s = max(slowest_s, taken_s)
        if taken_s > LIMIT_S:
            problem = f"{taken_s:.1f} s"
        found, trace.found = trace.found, []
        if reader.names_files:
            found = [one for one in found if not one.startswith("read ")]
        problem = "; ".join(found) or problem
        if problem:
            findings.append({"number": number, "problem": problem, "content": content[:3000].hex()})
    faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(home)
    taken_bytes = memory_bytes("VmHWM") - before_bytes if sys.platform == "linux" else 0
    return {
        "reader": kind,
        "tries": count,
        "refused": refused,
        "slowest_s": round(slowest_s, 3),
        "memory_bytes": taken_bytes,
        "findings": findings,
    }


def fuzz_guided(kind: str, seconds: int) -> None:
    """By atheris, which looks for inputs that reach new lines of clipctl."""
    import atheris

    from clipctl.errors import ClipctlError

    home = Path(tempfile.mkdtemp(prefix="clipctl-fuzz-")).resolve()
    with atheris.instrument_imports(include=["clipctl"]):
        reader = make_reader(kind, home)
    corpus = home / "corpus"
    corpus.mkdir()
    for number, content in enumerate(reader.seeds):
        (corpus / str(number)).write_bytes(content)

    def one(content: bytes) -> None:
        reader.write(home, content)
        with suppress(ClipctlError):
            reader.read(home)

    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4000"], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", type=int, metavar="SECONDS")
    asked = parser.parse_args()
    if asked.atheris:
        fuzz_guided(asked.reader, asked.atheris)
    else:
        json.dump(fuzz(asked.reader, asked.count, asked.seed), sys.stdout)


if __name__ == "__main__":
    main()
