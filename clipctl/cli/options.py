"""Every option, defined once: its flag, the setting it stands for, and its help.

Values stay text here; the config parses them, so that all mistakes are reported together.
"""

import inspect
import keyword
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

_DATA = "Data"
_MODEL = "Model"
_TRAINING = "Training"
_CHECKPOINTS = "Checkpoints"
_MACHINE = "Machine"
_RUN = "Run"
_OUTPUT = "Output"


# --- flags that stand for settings ----------------------------------------------------------------------------


class Flag(NamedTuple):
    """A flag that sets one key of the config."""

    flag: str
    key: str
    metavar: str
    help: str
    panel: str
    has_variable: bool = False  # CLIPCTL_… in the environment sets it too
    is_switch: bool = False  # takes no value; given, it means true

    @property
    def name(self) -> str:
        name = self.flag.removeprefix("--").replace("-", "_")
        return f"{name}_" if keyword.iskeyword(name) else name

    @property
    def variable(self) -> str | None:
        return f"CLIPCTL_{self.name.strip('_').upper()}" if self.has_variable else None

    def origin(self, value: Any) -> str:
        """Where a value comes from: the environment, if it equals the one set there, else the command line."""
        return self.variable if self.variable and os.environ.get(self.variable) == value else self.flag

    @property
    def parameter(self) -> inspect.Parameter:
        """As Typer reads it from a command's signature."""
        option = _option(self.flag, self.help, self.panel, self.metavar, self.variable)
        annotation = Annotated[bool, option] if self.is_switch else Annotated[str | None, option]
        return _parameter(self.name, annotation, False if self.is_switch else None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(flag: str, help: str, panel: str | None, metavar: str, envvar: str | None = None) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=envvar, show_default=False)


FORMATS = "csv, tsv, pipe, flickr, jsonl, coco, karpathy, json, webdataset, imagefolder, sidecar or classes"
# How data are read, for every command that reads them.
DATA_FLAGS = (
    Flag("--format", "data.format", "NAME", f"{FORMATS}; default: detected.", _DATA),
    Flag("--image-column", "data.image_column", "NAME", "Column or key of the pictures.", _DATA),
    Flag("--caption-column", "data.caption_column", "NAME", "Column or key of the captions, comma-separated.", _DATA),
    Flag("--image-root", "data.image_root", "DIR", "Directory against which relative paths are resolved.", _DATA),
    Flag("--separator", "data.separator", "CHARACTER", "Separator of a table: ',' '|' ';' or tab.", _DATA),
    Flag("--val", "data.val", "DATA", "Validation data; default: a part of DATA.", _DATA),
    Flag(
        "--val-fraction",
        "data.val_fraction",
        "SHARE",
        "Share to hold out, up to 1,000 pictures; default: 0.1.",
        _DATA,
    ),
    Flag("--max-bad", "data.max_bad", "SHARE", "Share of pictures that may be unusable; default: 5%.", _DATA),
    Flag("--tokenizer", "data.tokenizer", "NAME", "words, characters, bpe:4096, or a tokenizer.json.", _DATA, True),
)
PRESET_FLAG = Flag(
    "--preset", "preset", "NAME", "tiny, small, base, medium, large or huge; default: by recipe.", _MODEL, True
)
TRAIN_FLAGS = (
    *DATA_FLAGS,
    Flag("--cache", "runtime.cache", "WHERE", "Picture cache: auto (default), ram, disk or off.", _DATA, True),
    PRESET_FLAG,
    Flag("--layout", "layout", "NAME", "auto, or clip: a model that other CLIP libraries load.", _MODEL, True),
    Flag("--from", "tune.base", "MODEL", "Start from a run, a model's directory, or a hub name.", _MODEL, True),
    Flag(
        "--lock",
        "tune.lock",
        "TOWER",
        "With --from, freeze image, text or both; image:2 trains its last 2 blocks.",
        _MODEL,
    ),
    Flag("--lora", "tune.lora", "RANK", "With --from, train only added low-rank matrices.", _MODEL),
    Flag("--recipe", "recipe", "NAME", "auto: chosen for your data and time; plain: fixed defaults.", _TRAINING, True),
    Flag("--time", "train.time", "10m", "Time limit; model and training are chosen to fit it.", _TRAINING, True),
    Flag("--epochs", "train.epochs", "N", "Passes over the training data.", _TRAINING, True),
    Flag("--steps", "train.steps", "N", "Stop after this many steps instead.", _TRAINING, True),
    Flag("--batch-size", "train.batch_size", "N", "Batch size: pairs contrasted with each other.", _TRAINING, True),
    Flag("--micro-batch", "train.micro_batch", "N", "Pairs kept in memory at once; default: auto.", _TRAINING, True),
    Flag("--lr", "optim.lr", "RATE", "Peak learning rate.", _TRAINING, True),
    Flag("--patience", "train.patience", "N", "Stop after N evaluations without a new best.", _TRAINING, True),
    Flag("--seed", "train.seed", "N", "Same seed and number of threads: same weights.", _TRAINING, True),
    Flag(
        "--save-every",
        "save.every",
        "N",
        "5epochs, 500steps, 10min or 2h; default: 1min.",
        _CHECKPOINTS,
        True,
    ),
    Flag("--keep-last", "save.keep_last", "N", "Newest checkpoints to keep; default: 2.", _CHECKPOINTS, True),
    Flag("--keep-best", "save.keep_best", "N", "Best checkpoints to keep; default: 1.", _CHECKPOINTS, True),
    Flag("--device", "runtime.device", "NAME", "auto (default: measured), cpu, mps, cuda:N or hybrid.", _MACHINE, True),
    Flag("--precision", "runtime.precision", "NAME", "auto (default: measured), fp32, bf16 or fp16.", _MACHINE, True),
    Flag(
        "--threads",
        "runtime.threads",
        "N",
        "CPU threads; default: measured, one per core or fewer.",
        _MACHINE,
        True,
    ),
    Flag("--workers", "runtime.workers", "N", "Processes that load pictures; default: automatic.", _MACHINE, True),
    Flag("--recompute", "runtime.recompute", "", "Much less memory for a third more work.", _MACHINE, is_switch=True),
    Flag(
        "--shard",
        "runtime.shard",
        "",
        "Shard the model across the processes (FSDP).",
        _MACHINE,
        is_switch=True,
    ),
    Flag("--compile", "runtime.compile", "", "Use torch.compile; no gain on a CPU.", _MACHINE, is_switch=True),
)


# How data are read, without a split.
READING_FLAGS = DATA_FLAGS[:5]


def takes(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags, --config and --set. They reach it as its first argument: layers of settings, the file
    lowest, then the flags (or their environment variables), then --set."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            from clipctl.config.layers import Layer, load_yaml, parse_assignments

            file, assignments = values.pop("config"), values.pop("set")
            given = [(flag, values.pop(flag.name)) for flag in flags]
            layers = [load_yaml(file)] if file else []
            if data := values.get("data"):
                layers.append(Layer("DATA", {"data.source": data}))
            said = [Layer(flag.origin(value), {flag.key: value}) for flag, value in given if value not in (None, False)]
            layers += sorted(said, key=lambda layer: layer.origin.startswith("--"))  # flags over variables
            command([*layers, parse_assignments(assignments or [])], **values)

        own = list(inspect.signature(command).parameters.values())[1:]  # without the layers
        after = 1 + [one.name for one in own].index("data")  # arguments come first
        shared = [_parameter("config", Config, None), _parameter("set", Set, None)]
        signature = [*own[:after], *(flag.parameter for flag in flags), *shared, *own[after:]]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature]
        )
        return run

    return decorate


# --- options of single commands -------------------------------------------------------------------------------


def _switch(flag: str, help: str, panel: str | None = None) -> Any:
    return _option(flag, help, panel, "")


def _argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False)


_PLACES = "A table, JSON, directory or tar shards; several are joined."
Data = Annotated[list[str] | None, _argument("DATA", f"{_PLACES} Default: synthetic, built-in pictures.")]
DataToInspect = Annotated[list[str], _argument("DATA", f"{_PLACES} Or synthetic, the built-in pictures.")]
DataToJudgeBy = Annotated[list[str] | None, _argument("DATA", f"{_PLACES} Default: what the run held out.")]
Against = Annotated[list[str] | None, _option("--against", "Compare with this model. Repeatable.", None, "MODEL")]
Classes = Annotated[str | None, _option("--classes", "Zero-shot classes, separated by commas.", None, "A,B,C")]
PictureFolder = Annotated[str, _argument("DIR", "A folder of pictures, at any depth.")]
FromNames = Annotated[bool, _switch("--from-names", "Fill in captions from file names that hold words.")]
DeepLook = Annotated[bool, _switch("--deep", "Decode every picture, on all cores.", _DATA)]
Sheet = Annotated[Path | None, _option("--sheet", "Write a contact sheet: PNG or JPEG.", None, "FILE")]
Config = Annotated[Path | None, _option("--config", "YAML file with settings.", _MODEL, "FILE", "CLIPCTL_CONFIG")]
Set = Annotated[
    list[str] | None, _option("--set", "Any setting, such as optim.lr=1e-3. Repeatable.", _MODEL, "KEY=VALUE")
]
RunsDir = Annotated[
    str | None, _option("--runs-dir", "Directory of all runs; default: ./runs.", _RUN, "DIR", "CLIPCTL_RUNS")
]
Name = Annotated[str | None, _option("--name", "Name of the run; default: time and preset.", _RUN, "NAME")]
Resume = Annotated[
    str | None,
    _option("--resume", "Resume a run, or RUN@STEP; without RUN, the newest unfinished.", _RUN, "[RUN]"),
]
AllowChange = Annotated[bool, _switch("--allow-change", "With --resume: accept changed settings or data.", _RUN)]
AllowUnverifiedDevice = Annotated[
    bool,
    _switch("--allow-unverified-device", "Train on a device whose results differ from the CPU's.", _MACHINE),
]


def _processes(help: str) -> Any:
    return typer.Option("--nproc", metavar="N", min=1, max=1024, help=help, rich_help_panel=_MACHINE)


Processes = Annotated[
    int | None, _processes("Train in N processes on this machine, as torchrun does; the batch is split among them.")
]
Helpers = Annotated[int | None, _processes("Embed in N processes on this machine, as torchrun does.")]
Detach = Annotated[bool, _switch("--detach", "Train in the background; it outlives the terminal.", _RUN)]
DryRun = Annotated[bool, _switch("--dry-run", "Print the plan; create no run.", _RUN)]
Json = Annotated[bool, _switch("--json", "Print one JSON document to stdout.", _OUTPUT)]

Run = Annotated[
    str | None,
    _argument("RUN", "Name of the run, or the beginning or end of it; default: the one in progress, else the latest."),
]
RunToStop = Annotated[
    str | None, _argument("RUN", "Name of the run, or the beginning or end of it; default: the only one running.")
]
Once = Annotated[bool, _switch("--once", "Print the dashboard once and exit.")]
All = Annotated[bool, _switch("--all", "List all runs instead.")]
Interval = Annotated[
    float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Seconds between refreshes.")
]
Svg = Annotated[Path | None, _option("--svg", "Save the dashboard as an SVG picture.", None, "FILE")]
Png = Annotated[Path | None, _option("--png", "Save the dashboard as a PNG picture.", None, "FILE")]
Page = Annotated[str, typer.Option("--page", metavar="PAGE", help="overview, metrics, machine, model or retrieval.")]
Theme = Annotated[str, typer.Option("--theme", metavar="THEME", help="auto, dark, light, or ansi for 16 colours.")]
Pictures = Annotated[bool, _switch("--pictures", "Show thumbnails on the retrieval page.")]
Live = Annotated[bool, _switch("--live", "Show the dashboard in this terminal while training.", _OUTPUT)]
WaitSeconds = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait until it has stopped.")
]

Runs = Annotated[list[str] | None, _argument("RUN", "Names of runs, or the beginning or end of them; default: all.")]
Checkpoints = Annotated[
    list[str] | None,
    _argument("WHAT", "Runs, RUN@best, RUN@last, RUN@STEP, directories or indexes; default: all runs."),
]
Checkpoint = Annotated[str, _argument("CHECKPOINT", "RUN@best, RUN@last, RUN@STEP, RUN (its last) or a directory.")]
OtherCheckpoint = Annotated[str, _argument("OTHER", "The one to compare it with.")]
Tensors = Annotated[bool, _switch("--tensors", "List every tensor with its shape and type.")]
Everything = Annotated[bool, _switch("--all", "List every setting and every tensor.")]
Deep = Annotated[bool, _switch("--deep", "Also look for NaN and infinities in every tensor.")]
Yes = Annotated[bool, _switch("--yes", "Really delete; without it, list what would go.")]
KeepLastOf = Annotated[int, typer.Option("--keep-last", metavar="N", min=1, help="Newest checkpoints to keep.")]
KeepBestOf = Annotated[int, typer.Option("--keep-best", metavar="N", min=1, help="Best checkpoints to keep.")]

Model = Annotated[str, _argument("MODEL", "A run (its best checkpoint), RUN@last, a model's directory, or a hub name.")]
ModelOf = Annotated[
    str | None,
    _option("--model", "For a folder, or an index whose run was renamed: its model.", None, "MODEL"),
]
Places = Annotated[list[str], _argument("PATH", "Folders (recursive), pictures, tables, JSON or tar shards.")]
ModelOut = Annotated[Path, _option("-o", "Directory to write; must not exist.", None, "DIR")]
TokenizerFile = Annotated[
    Path | None, _option("--tokenizer", "tokenizer.json of a model that comes without one.", None, "FILE")
]
Activation = Annotated[
    str | None, _option("--activation", "gelu or quick_gelu, for a bare file of weights.", None, "NAME")
]
ExportFormat = Annotated[
    str,
    typer.Option("--to", metavar="NAME", help="transformers, open_clip, both, safetensors, onnx or coreml."),
]
ModelsToMerge = Annotated[list[str], _argument("MODEL", "Two models, or more; or one run: all its checkpoints.")]
Alphas = Annotated[
    list[str] | None, _option("--alpha", "Share of the second model; several are compared.", None, "SHARE...")
]
DataToMergeBy = Annotated[list[str] | None, _option("--data", "Captioned pictures to evaluate on.", None, "DATA...")]
MergedOut = Annotated[Path | None, _option("-o", "Directory for the merged model; must not exist.", None, "DIR")]
Int8 = Annotated[bool, _switch("--int8", "With --to onnx: also write 8-bit weights, and compare.")]
IndexOut = Annotated[Path, _option("-o", "Directory of the index; an existing one is updated.", None, "INDEX")]
Index = Annotated[Path, _argument("INDEX", "What clipctl embed made; or, with --model, a folder of pictures.")]
Queries = Annotated[list[str], _argument("QUERY", "Words, or a picture file.")]
Minus = Annotated[list[str] | None, _option("--minus", "What to steer away from. Repeatable.", None, "QUERY")]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, max=100_000, help="Pictures for each query.")]
TopPairs = Annotated[int, typer.Option("--top", metavar="N", min=1, max=100_000, help="Pairs to list.")]
Threshold = Annotated[float | None, _option("--threshold", "Lowest score to show.", None, "SCORE")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help="float16 or float32.")]
DeviceOf = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, mps or cuda:N.")]
Labels = Annotated[str | None, _option("--labels", "Labels, separated by commas.", None, "A,B,C")]
LabelsFile = Annotated[Path | None, _option("--labels-file", "One label per line.", None, "FILE")]
Templates = Annotated[
    list[str] | None, _option("--template", "Caption of a label, such as 'a photo of a {}'. Repeatable.", None, "TEXT")
]
TopLabels = Annotated[int, typer.Option("--top", metavar="N", min=1, max=1000, help="Labels for each picture.")]
Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Default: any free port.")]
NoOpen = Annotated[bool, _switch("--no-open", "Print the address; open no browser.")]
Folds = Annotated[
    int,
    typer.Option("--folds", metavar="N", min=0, max=20, help="Judge each of N folds by a model trained on the others."),
]
SuspectsOut = Annotated[Path | None, _option("-o", "Write all pairs as CSV, to edit and train on.", None, "FILE")]
RunsToReport = Annotated[list[str], _argument("RUN", "Names of runs, or the beginning or end of them.")]
ReportOut = Annotated[Path | None, _option("-o", "File to write; default: report.html.", None, "FILE")]
RunToExport = Annotated[str, _argument("RUN", "Name of the run, or the beginning or end of it.")]
RunsToRemove = Annotated[list[str], _argument("RUN", "Name of a run, or the beginning or end of it.")]
RunsToCompare = Annotated[list[str], _argument("RUN", "Names of two or more runs, or the beginning or end of them.")]
NewName = Annotated[str, _argument("NEW", "The new name.")]
ExportTo = Annotated[str, typer.Option("--to", metavar="NAME", help="csv or tensorboard.")]
ExportOut = Annotated[Path | None, _option("-o", "Directory to write to; default: RUN-csv.", None, "DIR")]
PlotName = Annotated[
    str | None,
    _option("--plot", "Only loss, recall, recall-at, accuracy, lr, temperature, grad-norm or speed.", None, "NAME"),
]
NoPictures = Annotated[bool, _switch("--no-pictures", "Leave out the retrieved pictures.")]
Csv = Annotated[bool, _switch("--csv", "Print CSV.")]

_MEASURE = "What to measure"
Sizes = Annotated[
    list[str] | None,
    _option("--sizes", "Elements: 1e6 1e7, or 1e5:1e8:7 for a range; no training steps.", _MEASURE, "N..."),
]
Suites = Annotated[
    list[str] | None,
    _option("--suites", "elementwise, matmul, attention, step; default: all.", _MEASURE, "NAME..."),
]
Devices = Annotated[list[str] | None, _option("--devices", "cpu, mps, cuda:0; default: all.", _MEASURE, "NAME...")]
Dtypes = Annotated[list[str] | None, _option("--dtypes", "fp32, bf16, fp16; default: all.", _MEASURE, "NAME...")]
ThreadCounts = Annotated[
    list[str] | None, _option("--threads", "Default: one thread, and one per core.", _MEASURE, "N...")
]
Models = Annotated[
    list[str] | None, _option("--model", "Presets whose training steps are timed.", _MEASURE, "PRESET...")
]
BatchSizes = Annotated[
    list[str] | None, _option("--batch-sizes", "Batch sizes for --model; default: 8.", _MEASURE, "N...")
]
MicroBatches = Annotated[
    list[str] | None, _option("--micro-batch", "Steps in micro-batches of N pairs.", _MEASURE, "N...")
]
Format = Annotated[
    str, typer.Option("--format", metavar="NAME", help="table, md, csv or json.", rich_help_panel=_OUTPUT)
]
Save = Annotated[Path | None, _option("--save", "Save the results as JSON.", _OUTPUT, "FILE")]
Compare = Annotated[Path | None, _option("--compare", "Compare with saved results.", _OUTPUT, "FILE")]
Plot = Annotated[Path | None, _option("--plot", "Plot the results: PNG or SVG.", _OUTPUT, "FILE")]

_QUESTION = "The model"
_ASSUMED = "The machine"
Params = Annotated[str | None, _option("--params", "Number of parameters.", _QUESTION, "150M")]
PresetOf = Annotated[str | None, _option("--preset", "tiny, small, base, medium, large or huge.", _QUESTION, "NAME")]
ConfigOf = Annotated[Path | None, _option("--config", "YAML file with settings.", _QUESTION, "FILE")]
BatchSizeOf = Annotated[str | None, _option("--batch-size", "Default: the preset's.", _QUESTION, "N")]
PrecisionOf = Annotated[str, _option("--precision", "auto (default), fp32, bf16 or fp16.", _QUESTION, "NAME")]
Pairs = Annotated[str | None, _option("--pairs", "Pairs per epoch; default: 10,000.", _QUESTION, "N")]
MemoryOf = Annotated[str | None, _option("--memory", "Assume a machine with this much memory.", _ASSUMED, "8G")]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        metavar="N",
        min=2,
        max=4096,
        help="Assume up to N machines like this one training together.",
        rich_help_panel=_ASSUMED,
    ),
]
Bandwidth = Annotated[
    str, _option("--bandwidth", "With --nodes: bandwidth between them; default: 1Gbps.", _ASSUMED, "1Gbps")
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        metavar="AMOUNT",
        min=0.0,
        help="With --nodes: price of one machine per hour.",
        rich_help_panel=_ASSUMED,
    ),
]
DevicesOf = Annotated[
    list[str] | None,
    _option("--devices", "Devices to compare; mps and cuda can be simulated.", _ASSUMED, "NAME..."),
]
Results = Annotated[
    Path | None, _option("--results", "Results of bench --save, even from another machine.", _ASSUMED, "FILE")
]
Measure = Annotated[bool, _switch("--measure", "Time real steps of this model first.", _ASSUMED)]
Issue = Annotated[bool, _switch("--issue", "Print a block to paste into a bug report instead.")]
CommandWords = Annotated[list[str] | None, _argument("COMMAND", "Such as train, or checkpoint show.")]
Shell = Annotated[str, _argument("SHELL", "bash, zsh or fish.")]
