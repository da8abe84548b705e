"""Models that other libraries wrote: recognised, checked, and turned into one of ours.

    a directory with config.json (model_type clip) and model.safetensors       transformers
    a directory with open_clip_config.json and open_clip_model.safetensors     open_clip
    a file of tensors in open_clip's or OpenAI's names                         its shapes say what it is

Pickles are only ever opened by torch's weights-only reader, which builds tensors and runs nothing.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from clipctl.config.layers import Layer, resolve
from clipctl.config.sections import ModelConfig, TrainConfig
from clipctl.data.tokenizers import FILE_LIMIT_BYTES, SubwordTokenizer, package, read_tokenizer
from clipctl.errors import CheckpointError, DataError
from clipctl.files import read_bounded, read_json, sha256_of
from clipctl.interop import configs, naming
from clipctl.interop.naming import Tensors
from clipctl.model.clip import Clip
from clipctl.model.weights import TrainedModel, check_tensors
from clipctl.runs.tensors import read_header

TRANSFORMERS_CONFIG, OPEN_CLIP_CONFIG, PREPROCESSOR = "config.json", "open_clip_config.json", "preprocessor_config.json"
TRANSFORMERS_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
SHARDS = "model.safetensors.index.json"
FILE_ENDINGS = (".safetensors", ".pt", ".pth", ".bin")
_JSON_LIMIT_BYTES = 10_000_000
OPENAI_VOCABULARY = 49_408


@dataclass(frozen=True)
class Hints:
    """What a model's files do not say."""

    tokenizer: Path | None = None
    activation: str | None = None


@dataclass(frozen=True)
class ForeignModel:
    """A model as another library saved it: ready to be loaded, nothing large read yet."""

    path: Path
    library: naming.Library
    files: tuple[Path, ...]  # of its tensors
    config: ModelConfig | None  # None: to be found from the tensors
    hints: Hints

    @property
    def fingerprint(self) -> str:
        """A fingerprint of its weights."""
        sums = [sha256_of(file.resolve()) for file in self.files]
        return sums[0] if len(sums) == 1 else "+".join(sums)

    def load(self) -> TrainedModel:
        try:
            return self._load()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} cannot be used: {error}", error.hint) from None

    def _load(self) -> TrainedModel:
        theirs: Tensors = {}
        for file in self.files:
            theirs |= read_tensors(file)
        translate = naming.from_transformers if self.library == "transformers" else naming.from_open_clip
        tensors = translate(theirs)
        model = self.config or configs.from_shapes(_shapes(tensors), self._activation(theirs))
        config = train_config(model, has_bias="bias" in tensors)
        clip = with_weights(config, tensors)
        tokenizer = read_foreign_tokenizer(self.path, self.hints.tokenizer, config)
        return TrainedModel(clip, config, tokenizer.to_dict())

    def _activation(self, theirs: Tensors) -> str:
        if self.hints.activation:
            return self.hints.activation
        if "input_resolution" in theirs:  # only OpenAI's own files have it
            return "quick_gelu"
        raise CheckpointError(
            "its tensors do not say which activation it was trained with",
            "pass --activation quick_gelu for OpenAI's weights, or gelu for LAION's and DataComp's",
        )


def recognise(path: Path, hints: Hints) -> ForeignModel:
    """The model in a directory or a file. Raises CheckpointError saying what it is instead."""
    if path.is_file():
        if path.suffix not in FILE_ENDINGS:
            raise CheckpointError(f"{path} is not a file of tensors: it ends in {path.suffix or 'nothing'}")
        return ForeignModel(path, "open_clip", (path,), None, hints)
    found = {name for name in (TRANSFORMERS_CONFIG, OPEN_CLIP_CONFIG) if (path / name).is_file()}
    if TRANSFORMERS_CONFIG in found and (files := _weights(path, TRANSFORMERS_WEIGHTS)):
        document, preprocessor = read_object(path / TRANSFORMERS_CONFIG), path / PREPROCESSOR
        seen = read_object(preprocessor) if preprocessor.is_file() else None
        if document.get("model_type") == "clip" or OPEN_CLIP_CONFIG not in found:
            return _described(path, "transformers", files, lambda: configs.from_transformers(document, seen), hints)
    if OPEN_CLIP_CONFIG in found and (files := _weights(path, (*OPEN_CLIP_WEIGHTS, *TRANSFORMERS_WEIGHTS))):
        document = read_object(path / OPEN_CLIP_CONFIG)
        return _described(path, "open_clip", files, lambda: configs.from_open_clip(document), hints)
    if found:
        raise CheckpointError(f"{path} has {found.pop()}, but no weights beside it: {', '.join(TRANSFORMERS_WEIGHTS)}")
    inside = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "nothing"
    raise CheckpointError(
        f"{path} is not a model: it has no {TRANSFORMERS_CONFIG} or {OPEN_CLIP_CONFIG} (found: {inside})"
    )


def has_weights(path: Path) -> bool:
    """Whether a directory has tensors, from whichever library."""
    return bool(_weights(path, (*TRANSFORMERS_WEIGHTS, *OPEN_CLIP_WEIGHTS)))


def _described(path: Path, library: naming.Library, files: tuple[Path, ...], read: Any, hints: Hints) -> ForeignModel:
    try:
        return ForeignModel(path, library, files, read(), hints)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {str(error)[:300]}", error.hint) from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:  # such as a list where settings belong
        raise CheckpointError(f"{path} cannot be used: its config is not valid: {str(error)[:100]}") from None


def _weights(path: Path, names: tuple[str, ...]) -> tuple[Path, ...]:
    if (path / SHARDS).is_file():
        shards = set(read_object(path / SHARDS).get("weight_map", {}).values())
        if not all(isinstance(one, str) and Path(one).name == one for one in shards):
            raise CheckpointError(f"{path / SHARDS} names files outside its directory")
        return tuple(path / one for one in sorted(shards))
    return next(((path / name,) for name in names if (path / name).is_file()), ())


def read_object(path: Path) -> dict[str, Any]:
    try:
        # Files in a hub's cache are links into its own store.
        document = read_json(path.resolve(), _JSON_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return document


def read_tensors(path: Path) -> Tensors:
    """The tensors of a file. A pickle is read by torch's weights-only reader, which runs nothing."""
    file = path.resolve()  # in a hub's cache a link to a file without an ending
    if path.suffix == ".safetensors":
        read_header(file)
        return load_file(file)
    try:
        document = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path.name} is a pickle that holds more than tensors, which clipctl never opens",
            "look for a safetensors file, or convert it yourself if you trust it",
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {str(error).splitlines()[0][:200]}") from None
    document = document.get("state_dict", document) if isinstance(document, Mapping) else document
    if not isinstance(document, Mapping) or not all(isinstance(one, torch.Tensor) for one in document.values()):
        raise CheckpointError(f"{path.name} is not a state dict: names and tensors")
    return {str(name).removeprefix("module."): tensor for name, tensor in document.items()}


# --- parts ----------------------------------------------------------------------------------------------------


def train_config(model: ModelConfig, *, has_bias: bool) -> TrainConfig:
    """The settings of a model that was not trained here."""
    values = {
        f"model.{section}.{name}": value
        for section, tower in (("image", model.image), ("text", model.text))
        for name, value in vars(tower).items()
    }
    values |= {"model.embed_dim": model.embed_dim, "model.activation": model.activation}
    return resolve([Layer("the model's config", {**values, "train.loss": "sigmoid" if has_bias else "softmax"})])


def with_weights(config: TrainConfig, tensors: Tensors) -> Clip:
    """A model of this shape with these tensors; every one that is missing, left over or of another shape is named."""
    with torch.device("meta"):  # shapes only: the weights come from the file
        model = Clip(config.model, loss=config.train.loss)
    if tensors.get("log_scale") is not None:
        tensors = {**tensors, "log_scale": tensors["log_scale"].reshape(())}
    if tensors.get("bias") is not None:
        tensors = {**tensors, "bias": tensors["bias"].reshape(())}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_tensors("its weights", _shapes(tensors), wanted)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_foreign_tokenizer(path: Path, given: Path | None, config: TrainConfig) -> SubwordTokenizer:
    """tokenizer.json, or vocab.json and merges.txt, beside the model; for OpenAI's vocabulary also the copy in an
    installed open_clip."""
    context, vocab_size = config.model.text.context, config.model.text.vocab_size
    directory = path if path.is_dir() else path.parent
    if given is not None:
        tokenizer = read_tokenizer(given, context)
    elif (directory / "tokenizer.json").is_file():
        tokenizer = read_tokenizer(directory / "tokenizer.json", context)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        vocabulary = read_object(directory / "vocab.json")
        lines = read_bounded((directory / "merges.txt").resolve(), FILE_LIMIT_BYTES).decode().splitlines()
        tokenizer = _openai_tokenizer(vocabulary, _merges(lines), context)
    elif vocab_size == OPENAI_VOCABULARY and (known := _open_clip_vocabulary()):
        tokenizer = _openai_tokenizer(*known, context)
    else:
        raise CheckpointError(
            "it comes without a tokenizer",
            "pass the model's tokenizer.json, or one with the same vocabulary, with --tokenizer",
        )
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"its tokenizer has {tokenizer.vocab_size:,} ids, but the model knows {vocab_size:,}",
            "a CLIP model needs end-of-text as its highest id; pass another --tokenizer",
        )
    return tokenizer


def _openai_tokenizer(vocabulary: Mapping[str, int], merges: list[tuple[str, str]], context: int) -> SubwordTokenizer:
    """OpenAI's byte-pair encoding: lower case, words split from punctuation and digits, `</w>` ends a word."""
    library = package()
    try:
        model = library.models.BPE(
            dict(vocabulary), merges, unk_token="<|endoftext|>", end_of_word_suffix="</w>", fuse_unk=False
        )
    except Exception as error:  # the package raises bare Exception
        raise DataError(
            f"vocab.json and merges.txt do not fit together: {str(error)[:120]}", "take both from the same model"
        ) from None
    whole = library.Tokenizer(model)
    spaces = library.normalizers.Replace(library.Regex(r"\s+"), " ")
    whole.normalizer = library.normalizers.Sequence(
        [library.normalizers.NFC(), spaces, library.normalizers.Lowercase()]
    )
    words = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    whole.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Split(library.Regex(words), "removed", invert=True),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    whole.decoder = library.decoders.ByteLevel()
    return SubwordTokenizer(whole.to_str(), context)


def _merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Two symbols per line; the first line says which version of the file it is."""
    pairs = (line.split() for line in lines if not line.startswith("#version"))
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _open_clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]] | None:
    """OpenAI's vocabulary from an installed open_clip, which ships it."""
    import gzip
    from importlib import util

    spec = util.find_spec("open_clip")
    file = Path(spec.origin).parent / "bpe_simple_vocab_16e6.txt.gz" if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    count = OPENAI_VOCABULARY - 2 * 256 - 2  # bytes, bytes that end a word, start and end
    merges = _merges(lines[1 : count + 1])
    symbols = sorted(package().pre_tokenizers.ByteLevel.alphabet(), key=_byte_order)
    words = [*symbols, *(f"{one}</w>" for one in symbols), *(left + right for left, right in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return {word: id for id, word in enumerate(words)}, merges


def _byte_order(symbol: str) -> tuple[bool, int]:
    """Printable bytes first, as they are; then stand-ins for the others, from U+0100 on."""
    return ord(symbol) >= 0x100, ord(symbol)
