"""Models from the Hugging Face hub, by name: downloaded once, resumed if interrupted, pinned to a commit."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from clipctl.errors import DataError
from clipctl.progress import Tell, silent

PREFIX = "hf-hub:"
TIMEOUT_S = 20.0
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What a CLIP needs; other frameworks' weights stay where they are.
_SETTINGS = ("*.json", "merges.txt")
_WEIGHTS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")


class Download(NamedTuple):
    path: Path
    revision: str  # the commit


def is_name(text: str) -> bool:
    """`openai/clip-vit-base-patch32`, or with `hf-hub:` before it."""
    return bool(_NAME.fullmatch(text.removeprefix(PREFIX).partition("@")[0])) and not text.startswith((".", "/", "~"))


def download(text: str, revision: str | None = None, tell: Tell = silent) -> Download:
    """The files of a model, on disk. What was downloaded before is not downloaded again."""
    name, _, wanted = text.removeprefix(PREFIX).partition("@")
    asked = revision or wanted or None
    hub = _package()
    tell(f"looking for {name} on the hub")
    try:
        facts = hub.HfApi().model_info(name, revision=asked, timeout=TIMEOUT_S)
        files = {one.rfilename for one in facts.siblings}
    except Exception as error:  # its errors have many classes: no network, no such model, not allowed
        return _kept(hub, name, asked, error)
    weights = next((one for one in _WEIGHTS if one in files), None)
    if weights is None:
        raise DataError(
            f"{name} on the hub has no CLIP weights that clipctl reads ({', '.join(_WEIGHTS)})",
            "use a CLIP model, for example openai/clip-vit-base-patch32",
        )
    try:
        path = Path(
            hub.snapshot_download(
                name, revision=asked, allow_patterns=[*_SETTINGS, weights], tqdm_class=_bar(hub, name, tell)
            )
        )
    except Exception as error:  # as above; what is on disk stays, and the next try goes on from there
        return _kept(hub, name, asked, error)
    return Download(path, path.name)


def _bar(hub: Any, name: str, tell: Tell) -> type:
    """The package's progress bar, reporting instead of drawing."""

    class Told(hub.utils.tqdm):  # type: ignore[misc]
        def display(self, *_: Any, **__: Any) -> None:
            if self.total and self.unit == "B":
                tell(f"downloading {name}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

    return Told


def _kept(hub: Any, name: str, revision: str | None, reason: Exception) -> Download:
    """The files of an earlier download, if the hub cannot be reached."""
    try:
        path = Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        why = str(reason).strip().splitlines()[0][:200] if str(reason).strip() else type(reason).__name__
        raise DataError(
            f"{name} cannot be downloaded from the hub: {why}",
            "without a network, pass the directory of a model that was downloaded before",
        ) from None
    return Download(path, path.name)


def _package() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(
            "a model from the hub needs the huggingface-hub package, which is not installed",
            "pip install 'clipctl[hub]', or pass the directory of a model that was downloaded before",
        ) from None
    return huggingface_hub
