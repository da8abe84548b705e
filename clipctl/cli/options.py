"""Every option, once. Values stay text here; the config parses them, so that all mistakes are reported together."""

from pathlib import Path
from typing import Annotated, Any

import typer

_MODEL = "Model"
_TRAINING = "Training"
_CHECKPOINTS = "Checkpoints"
_MACHINE = "Machine"
_RUN = "Run"


def _option(flag: str, help: str, panel: str, metavar: str, envvar: str | None = None) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=envvar, show_default=False)


_DATA = "Data"
Data = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA",
        help="A table, JSON, directory or tar shards; several are joined. Default: synthetic, or synthetic:PAIRS.",
        show_default=False,
    ),
]
DataToInspect = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA",
        help="A table, JSON, directory or tar shards, or synthetic; several are joined.",
        show_default=False,
    ),
]
DataFormat = Annotated[
    str | None,
    _option(
        "--format",
        "csv, tsv, pipe, flickr, jsonl, coco, karpathy, json, webdataset, imagefolder, sidecar or classes; "
        "default: detected.",
        _DATA,
        "NAME",
    ),
]
ImageColumn = Annotated[str | None, _option("--image-column", "Column or key of the pictures.", _DATA, "NAME")]
CaptionColumn = Annotated[
    str | None, _option("--caption-column", "Column or key of the captions; several with commas.", _DATA, "NAME")
]
ImageRoot = Annotated[str | None, _option("--image-root", "Where relative picture paths start.", _DATA, "DIR")]
Separator = Annotated[
    str | None, _option("--separator", "Separator of a table: ',' '|' ';' or tab.", _DATA, "CHARACTER")
]
Val = Annotated[str | None, _option("--val", "Held-out data of your own.", _DATA, "DATA")]
ValFraction = Annotated[
    str | None,
    _option("--val-fraction", "Share of the pictures held out, at most 1,000 of them; default: 0.1.", _DATA, "SHARE"),
]
Tokenizer = Annotated[
    str | None,
    _option(
        "--tokenizer",
        "characters (default), bpe:4096 (300 or more), or a tokenizer.json.",
        _DATA,
        "NAME",
        "CLIPCTL_TOKENIZER",
    ),
]
Cache = Annotated[
    str | None,
    _option("--cache", "Decoded pictures: auto (default), ram, disk or off.", _DATA, "WHERE", "CLIPCTL_CACHE"),
]
DeepLook = Annotated[
    bool, typer.Option("--deep", metavar="", help="Decode every picture, on all cores.", show_default=False)
]
Sheet = Annotated[
    Path | None,
    typer.Option("--sheet", metavar="FILE", help="Write a contact sheet: PNG or JPEG.", show_default=False),
]
Preset = Annotated[
    str | None,
    _option("--preset", "tiny (default), small, base, medium, large or huge.", _MODEL, "NAME", "CLIPCTL_PRESET"),
]
Config = Annotated[Path | None, _option("--config", "YAML file with settings.", _MODEL, "FILE", "CLIPCTL_CONFIG")]
Set = Annotated[
    list[str] | None, _option("--set", "Any setting, such as optim.lr=1e-3. Repeatable.", _MODEL, "KEY=VALUE")
]
Epochs = Annotated[str | None, _option("--epochs", "How often every pair is seen.", _TRAINING, "N", "CLIPCTL_EPOCHS")]
Steps = Annotated[str | None, _option("--steps", "End after this many steps instead.", _TRAINING, "N", "CLIPCTL_STEPS")]
BatchSize = Annotated[
    str | None, _option("--batch-size", "Pairs that are told apart at once.", _TRAINING, "N", "CLIPCTL_BATCH_SIZE")
]
Lr = Annotated[str | None, _option("--lr", "Peak learning rate.", _TRAINING, "RATE", "CLIPCTL_LR")]
Seed = Annotated[str | None, _option("--seed", "Same seed and threads, same weights.", _TRAINING, "N", "CLIPCTL_SEED")]
SaveEvery = Annotated[
    str | None,
    _option(
        "--save-every", "5e (default: epochs), 500s (steps) or 10m (minutes).", _CHECKPOINTS, "N", "CLIPCTL_SAVE_EVERY"
    ),
]
KeepLast = Annotated[
    str | None, _option("--keep-last", "Newest ones to keep; default: 2.", _CHECKPOINTS, "N", "CLIPCTL_KEEP_LAST")
]
KeepBest = Annotated[
    str | None, _option("--keep-best", "Best ones to keep; default: 1.", _CHECKPOINTS, "N", "CLIPCTL_KEEP_BEST")
]
Device = Annotated[
    str | None,
    _option("--device", "auto (default: measured), cpu, mps, cuda:N or hybrid.", _MACHINE, "NAME", "CLIPCTL_DEVICE"),
]
Precision = Annotated[
    str | None,
    _option("--precision", "auto (default: measured), fp32, bf16 or fp16.", _MACHINE, "NAME", "CLIPCTL_PRECISION"),
]
Threads = Annotated[
    str | None, _option("--threads", "CPU threads; default: one a usable core.", _MACHINE, "N", "CLIPCTL_THREADS")
]
Workers = Annotated[
    str | None,
    _option("--workers", "Processes that prepare pictures; default: chosen.", _MACHINE, "N", "CLIPCTL_WORKERS"),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute",
        metavar="",
        help="Much less memory for a third more work.",
        rich_help_panel=_MACHINE,
        show_default=False,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        metavar="",
        help="Use torch.compile; gains nothing on a CPU.",
        rich_help_panel=_MACHINE,
        show_default=False,
    ),
]
RunsDir = Annotated[
    str | None, _option("--runs-dir", "Where runs are kept; default: ./runs.", _RUN, "DIR", "CLIPCTL_RUNS")
]
Name = Annotated[str | None, _option("--name", "Name of the run; default: time and preset.", _RUN, "NAME")]
Resume = Annotated[
    str | None,
    _option("--resume", "Go on with a run; without RUN, with the newest unfinished one.", _RUN, "[RUN[@STEP]]"),
]
AllowChange = Annotated[
    bool,
    typer.Option(
        "--allow-change",
        metavar="",
        help="With --resume: take changed settings.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]
AllowUnverifiedDevice = Annotated[
    bool,
    typer.Option(
        "--allow-unverified-device",
        metavar="",
        help="Train on a device that does not compute what the CPU does.",
        rich_help_panel=_MACHINE,
        show_default=False,
    ),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        metavar="",
        help="Train in the background; it outlives the terminal.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", metavar="", help="Print the plan and write nothing.", rich_help_panel=_RUN, show_default=False
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="By name or a part of it; default: the one that is running.", show_default=False
    ),
]
RunToStop = Annotated[str, typer.Argument(metavar="RUN", help="By name or a part of it.", show_default=False)]
Once = Annotated[bool, typer.Option("--once", metavar="", help="Print it once and leave.", show_default=False)]
All = Annotated[bool, typer.Option("--all", metavar="", help="A table of all runs instead.", show_default=False)]
Interval = Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Between looks.")]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write the dashboard as a picture.", show_default=False)
]
WaitSeconds = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait for it.")]
Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", help="Runs by name or a part of it; default: all.", show_default=False),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WHAT]...", help="Runs, RUN@best, RUN@last, RUN@STEP or directories; default: all.", show_default=False
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="RUN@best, RUN@last, RUN@STEP, RUN (its last) or a directory.")
]
OtherCheckpoint = Annotated[str, typer.Argument(metavar="OTHER", help="The one to compare it with.")]
Deep = Annotated[
    bool,
    typer.Option("--deep", metavar="", help="Also look for NaN and infinities in every tensor.", show_default=False),
]
Yes = Annotated[bool, typer.Option("--yes", metavar="", help="Delete; otherwise only tell.", show_default=False)]
KeepLastOf = Annotated[int, typer.Option("--keep-last", metavar="N", min=1, help="Newest ones to keep.")]
KeepBestOf = Annotated[int, typer.Option("--keep-best", metavar="N", min=1, help="Best ones to keep.")]
Json = Annotated[
    bool,
    typer.Option("--json", metavar="", help="One JSON document on stdout.", rich_help_panel=_RUN, show_default=False),
]
_MEASURE = "What to measure"
_OUTPUT = "Output"


def _several(flag: str, help: str, metavar: str) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, rich_help_panel=_MEASURE, show_default=False)


Sizes = Annotated[
    list[str] | None, _several("--sizes", "Elements: 1e6 1e7, or 1e5:1e8:7 for a range; without steps.", "N...")
]
Suites = Annotated[
    list[str] | None, _several("--suites", "elementwise, matmul, attention, step; default: all.", "NAME...")
]
Devices = Annotated[list[str] | None, _several("--devices", "cpu, mps, cuda:0; default: all there are.", "NAME...")]
Dtypes = Annotated[list[str] | None, _several("--dtypes", "fp32, bf16, fp16; default: all.", "NAME...")]
ThreadCounts = Annotated[list[str] | None, _several("--threads", "Default: one, and one a core.", "N...")]
Models = Annotated[list[str] | None, _several("--model", "Presets to step through; default: probes.", "PRESET...")]
BatchSizes = Annotated[list[str] | None, _several("--batch-sizes", "Batches for --model; default: 8.", "N...")]
Format = Annotated[
    str, typer.Option("--format", metavar="NAME", help="table, md, csv or json.", rich_help_panel=_OUTPUT)
]
Save = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="FILE", help="Keep the results as JSON.", rich_help_panel=_OUTPUT, show_default=False
    ),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare", metavar="FILE", help="Compare with kept results.", rich_help_panel=_OUTPUT, show_default=False
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw them: PNG or SVG.", rich_help_panel=_OUTPUT, show_default=False),
]
_QUESTION = "The model"
_IMAGINED = "The machine"


def _asked(flag: str, help: str, metavar: str, panel: str = _QUESTION) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


Params = Annotated[str | None, _asked("--params", "How many parameters it has.", "150M")]
PresetOf = Annotated[str | None, _asked("--preset", "tiny, small, base, medium, large or huge.", "NAME")]
ConfigOf = Annotated[Path | None, _asked("--config", "YAML file with settings.", "FILE")]
BatchSizeOf = Annotated[str | None, _asked("--batch-size", "Default: that of the preset.", "N")]
PrecisionOf = Annotated[str, _asked("--precision", "auto (default), fp32, bf16 or fp16.", "NAME")]
Pairs = Annotated[str | None, _asked("--pairs", "Pairs in an epoch; default: 10,000.", "N")]
MemoryOf = Annotated[str | None, _asked("--memory", "Imagine a machine with this much memory.", "8G", _IMAGINED)]
DevicesOf = Annotated[
    list[str] | None, _asked("--devices", "Devices to compare; mps and cuda can be imagined.", "NAME...", _IMAGINED)
]
Results = Annotated[Path | None, _asked("--results", "What bench --save kept, maybe elsewhere.", "FILE", _IMAGINED)]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        metavar="",
        help="Make real steps of this model first.",
        rich_help_panel=_IMAGINED,
        show_default=False,
    ),
]
