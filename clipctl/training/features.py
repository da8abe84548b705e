"""Features of locked towers: computed once, kept on disk, read in every epoch after that.

features/KEY-view-1/{rows.npy, keys.npy, manifest.json}, … , KEY-captions/{…}

The key is a hash of all that features depend on: the tower's weights, the pictures, how they are augmented, the
precision. The manifest, written last, has the sha256 of every file: what a power cut or another program left behind is
not trusted but computed again.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock

from clipctl import files
from clipctl.data.batch import Batch
from clipctl.data.features import FeatureDataset, Features, Floats
from clipctl.data.held_out import HeldOut
from clipctl.data.loader import TrainLoader
from clipctl.data.sampling import Key
from clipctl.data.source import Keys
from clipctl.hardware import disk
from clipctl.hardware.shelf import Shelf
from clipctl.model.encoder import Encoder
from clipctl.progress import Count
from clipctl.training.evaluate import Evaluator
from clipctl.training.plan import TrainPlan
from clipctl.training.state import TrainState

BATCH = 64  # pictures or captions computed at a time; always the same, so that the last bits are too
MANIFEST, MANIFEST_LIMIT_BYTES = "manifest.json", 100_000_000
DISK_SHARE = 0.2  # of the free disk, that all kept features may take


def with_features(
    plan: TrainPlan, state: TrainState, loader: TrainLoader, evaluator: Evaluator, progress: Count
) -> tuple[TrainLoader, Evaluator]:
    """A loader and an evaluator that run no locked tower. `progress` may raise: finished views are kept."""
    found = _Maker(plan, state, loader, progress).features()
    pixels_needed = found.views is None
    collate, workers = (loader.collate, loader.workers) if pixels_needed else (loader.collate.plain, 0)
    batches = loader.of(FeatureDataset(loader.dataset, found), collate, workers=workers)
    loader.close()
    return batches, evaluator.of(held_out_features(plan, state, evaluator.held_out))


def held_out_features(plan: TrainPlan, state: TrainState, held_out: HeldOut) -> HeldOut:
    """The same held-out pairs, so that evaluating does not run a locked tower either."""
    encoder, locked = _encoder(state), plan.config.tune.locked
    more = [_of_captions(encoder, tokens) if "text" in locked else tokens for tokens in held_out.more_tokens]
    return held_out._replace(batches=[featured(plan, state, batch) for batch in held_out.batches], more_tokens=more)


def featured(plan: TrainPlan, state: TrainState, batch: Batch) -> Batch:
    """A batch with features of locked towers in place of the inputs they are computed from."""
    encoder, locked = _encoder(state), plan.config.tune.locked
    if "image" in locked:
        ready = batch.to(state.device.image, state.device.text)
        parts = [encoder.image_features(part.seen, part.jitter).cpu() for part in ready.split(BATCH)]
        batch = batch._replace(images=torch.cat(parts), jitter=None, views=None)
    if "text" in locked:
        batch = batch._replace(tokens=_of_captions(encoder, batch.tokens))
    return batch


# --- computing ------------------------------------------------------------------------------------------------


def _encoder(state: TrainState) -> Encoder:
    return Encoder(state.model, state.device, precision=state.precision, compiled=state.compiled)


def _of_captions(encoder: Encoder, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([encoder.text_features(part).cpu() for part in torch.split(tokens, BATCH)])


_uses: list[FileLock] = []  # of what this process reads as it trains


class _Maker:
    """Makes features, or finds them on disk: one entry for each view of the pictures, one for the captions."""

    def __init__(self, plan: TrainPlan, state: TrainState, loader: TrainLoader, progress: Count) -> None:
        self._plan, self._loader, self._progress = plan, loader, progress
        self._encoder, self._key = _encoder(state), _key(plan, state)

    def features(self) -> Features:
        tune, views, bad = self._plan.config.tune, list[Floats](), dict[int, str]()
        if "image" in tune.locked:
            for view in range(1, 1 + (tune.views or 1)):
                entry = self._kept(f"view-{view}", partial(self._view, view))
                views.append(entry.rows)
                bad |= entry.bad
        captions = self._kept("captions", self._captions) if "text" in tune.locked else None
        keys = np.zeros(0, dtype=np.uint64) if captions is None else captions.keys
        return Features(views or None, None if captions is None else captions.rows, keys, bad)

    def _kept(self, name: str, compute: Callable[[], "_Entry"]) -> "_Entry":
        shelf = Shelf("features")
        path = shelf.home / f"{self._key}-{name}"
        _uses.append(shelf.use(path.name))
        with FileLock(path.with_name(f"{path.name}.lock")):
            found = _read(path)
            if found is None:
                found = compute()
                with suppress(OSError):  # a full disk costs the next run some time, not this one its features
                    _make_room(shelf, found.rows.nbytes)
                    _write(path, found)
        return found

    def _view(self, view: int) -> "_Entry":
        pictures, views = len(self._plan.data.train), self._plan.config.tune.views or 1
        in_order = self._loader.of(
            self._loader.dataset,
            self._loader.collate,
            workers=self._loader.workers,
            sampler=InOrder(pictures, view),
        )
        rows, bad, device = list[torch.Tensor](), dict[int, str](), self._encoder.device
        with closing(in_order):
            for batch in in_order.epoch(view):
                self._progress(pictures * (view - 1) + sum(map(len, rows)), pictures * views)
                bad |= {one.picture: one.reason for one in batch.bad}
                ready = batch.to(device.image, device.text)
                rows.append(self._encoder.image_features(ready.seen, ready.jitter).cpu())
        return _Entry(torch.cat(rows).numpy(), np.zeros(0, dtype=np.uint64), bad)

    def _captions(self) -> "_Entry":
        source, tokenizer = self._plan.data.train, self._plan.data.tokenizer
        texts = {
            source.caption_key(index, which): source.caption(index, which)
            for index in range(len(source))
            for which in range(source.caption_count(index))
        }
        keys = np.array(sorted(texts), dtype=np.uint64)
        tokens = torch.from_numpy(np.stack([tokenizer.encode(texts[int(key)]) for key in keys]))
        return _Entry(_of_captions(self._encoder, tokens).numpy(), keys, {})


class _Entry(NamedTuple):
    rows: Floats
    keys: Keys  # of captions
    bad: dict[int, str]  # pictures that could not be used


class InOrder:
    """Every picture once, in the order of the source, in place of a sampler that shuffles."""

    def __init__(self, pictures: int, view: int) -> None:
        self._pictures, self._view = pictures, view

    def start(self, epoch: int, first_batch: int = 0) -> None:
        pass

    def __len__(self) -> int:
        return -(-self._pictures // BATCH)

    def __iter__(self) -> Iterator[Sequence[Key]]:
        for first in range(0, self._pictures, BATCH):
            yield [Key(self._view, index, 0) for index in range(first, min(first + BATCH, self._pictures))]


# --- keeping --------------------------------------------------------------------------------------------------


def _key(plan: TrainPlan, state: TrainState) -> str:
    config = plan.config
    digest = sha256()
    for name in config.tune.locked:
        for key, tensor in sorted(getattr(state.model, name).state_dict().items()):
            if not key.startswith("projection"):
                digest.update(f"{name}.{key}".encode())
                digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    facts = {
        "data": plan.data.fingerprint,
        "tokenizer": plan.data.tokenizer.to_dict(),
        "augmentation": asdict(plan.data.augmentation),
        "side": [config.model.image.size_px, plan.data.kept_side_px],
        "pixels": [config.model.image.mean, config.model.image.std, config.model.activation],
        "views": config.tune.views,
        "locked": config.tune.locked,
        "seed": config.train.seed,
        "computed": [state.precision, str(state.device.image), config.runtime.attention, torch.__version__],
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:24]


def _write(path: Path, entry: _Entry) -> None:
    files.delete(path)
    with files.replaced(path) as partial:
        partial.mkdir()
        np.save(partial / "rows.npy", entry.rows)
        np.save(partial / "keys.npy", entry.keys)
        sums = {file.name: files.sha256_of(file) for file in partial.iterdir()}
        document = {"files": sums, "bad": {str(index): reason for index, reason in entry.bad.items()}}
        files.write_sealed(partial / MANIFEST, document)


def _read(path: Path) -> _Entry | None:
    """None if it does not exist, or has changed since it was written."""
    try:
        document = files.read_sealed(path / MANIFEST, MANIFEST_LIMIT_BYTES)
        if any(files.sha256_of(path / name) != document["files"][name] for name in ("rows.npy", "keys.npy")):
            return None
        rows = np.load(path / "rows.npy", mmap_mode="r", allow_pickle=False)
        keys = np.load(path / "keys.npy", mmap_mode="r", allow_pickle=False)
        if (rows.ndim, rows.dtype.kind, keys.ndim, keys.dtype) != (2, "f", 1, np.uint64):
            return None
        return _Entry(rows, keys, {int(index): str(reason) for index, reason in document["bad"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _make_room(shelf: Shelf, need_bytes: int) -> None:
    """Delete the least recently used entries until there is room, but none in use."""
    with shelf.swept() as found:
        sizes = {one: files.size_on_disk(one) for one in reversed(found)}
        room_bytes = DISK_SHARE * (disk.free_bytes(shelf.home) + sum(sizes.values())) - need_bytes
        if room_bytes < 0:
            raise OSError("too large to keep")
        for one in list(sizes):
            if sum(sizes.values()) <= room_bytes:
                break
            shelf.delete(one)
            del sizes[one]
