"""What help says beyond the options: examples of every command, and which options of a long list come first."""

SHOW_ALL = "--help-all"
# Commands with more options than this show only those below; the others are behind --help-all.
MOST_OPTIONS = 14
FIRST_OPTIONS: dict[str, set[str]] = {
    "train": {
        "--val",
        "--preset",
        "--from",
        "--time",
        "--epochs",
        "--batch-size",
        "--lr",
        "--seed",
        "--device",
        "--name",
        "--resume",
        "--detach",
        "--dry-run",
        "--live",
    },
    "data inspect": {
        "--format",
        "--image-column",
        "--caption-column",
        "--image-root",
        "--val",
        "--max-bad",
        "--preset",
        "--deep",
        "--sheet",
        "--json",
    },
    "classify": {"--labels", "--labels-file", "--template", "--top", "--image-column", "--device", "--csv", "--json"},
}

# By the words that call a command: what it does, and the line to type.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("Train a first model on built-in pictures, in about a minute", "clipctl train"),
        ("See how your own pictures and captions would be read", "clipctl data inspect captions.csv"),
        ("Find pictures by words, with the model of a run", 'clipctl search photos "a red boat" --model a1f3'),
        ("Explain one command", "clipctl help train"),
    ),
    "train": (
        ("Train on built-in pictures, in about a minute", "clipctl train"),
        ("Train the best model that 10 minutes allow on your own data", "clipctl train captions.csv --time 10m"),
        (
            "Fine-tune a model from the hub",
            "clipctl train captions.csv --from openai/clip-vit-base-patch32",
        ),
        ("Resume the newest unfinished run", "clipctl train --resume"),
    ),
    "checkpoint": (
        ("List the checkpoints of all runs", "clipctl checkpoint list"),
        ("Check that nothing is damaged", "clipctl checkpoint verify"),
        ("Export a run for use in a browser", "clipctl checkpoint export a1f3 --to onnx -o web"),
    ),
    "checkpoint list": (
        ("List the checkpoints of all runs", "clipctl checkpoint list"),
        ("Those of one run, by the end of its name", "clipctl checkpoint list a1f3"),
    ),
    "checkpoint show": (
        ("Show the last checkpoint of a run", "clipctl checkpoint show a1f3"),
        ("With every tensor", "clipctl checkpoint show a1f3 --tensors"),
        ("Show its best one as JSON", "clipctl checkpoint show a1f3@best --json"),
    ),
    "checkpoint verify": (
        ("Check every checkpoint of every run", "clipctl checkpoint verify"),
        ("Check one run, and look for NaN in its tensors", "clipctl checkpoint verify a1f3 --deep"),
        ("Check an index of embeddings", "clipctl checkpoint verify photos.index"),
    ),
    "checkpoint prune": (
        ("List what could be deleted", "clipctl checkpoint prune"),
        (
            "In one run, delete all but the best and the newest three",
            "clipctl checkpoint prune a1f3 --keep-last 3 --yes",
        ),
    ),
    "checkpoint diff": (
        ("See what changed between the best and the last", "clipctl checkpoint diff a1f3@best a1f3@last"),
        ("Compare two runs", "clipctl checkpoint diff a1f3 b2e4"),
    ),
    "checkpoint merge": (
        ("Average two models", "clipctl checkpoint merge a1f3 b2e4 -o merged"),
        (
            "Mix a fine-tuned run with its base in three ratios, and keep the best",
            "clipctl checkpoint merge a1f3@base a1f3 --alpha 0 0.5 1 -o merged",
        ),
    ),
    "checkpoint import": (
        (
            "Turn a model from the hub into one of clipctl's",
            "clipctl checkpoint import openai/clip-vit-base-patch32 -o my-clip",
        ),
        ("The same from a directory on this machine", "clipctl checkpoint import clip-vit-b32 -o my-clip"),
    ),
    "checkpoint export": (
        ("For transformers and open_clip", "clipctl checkpoint export a1f3 -o my-clip"),
        ("For onnxruntime and the browser, small", "clipctl checkpoint export a1f3 --to onnx --int8 -o web"),
    ),
    "data": (
        ("See how your data is read", "clipctl data inspect captions.csv"),
        ("Start a table of captions for a folder of pictures", "clipctl data template photos > captions.csv"),
        ("Find captions that do not fit their picture", "clipctl data suspects a1f3"),
    ),
    "data inspect": (
        ("Look at the built-in pictures", "clipctl data inspect synthetic"),
        ("Look at a table, and decode every picture", "clipctl data inspect captions.csv --deep"),
        ("Draw pictures and captions on one sheet", "clipctl data inspect captions.csv --sheet sheet.png"),
    ),
    "data template": (
        ("Write a table with a row per picture", "clipctl data template photos > captions.csv"),
        ("Take captions from the file names", "clipctl data template photos --from-names > captions.csv"),
    ),
    "data suspects": (
        ("List the 20 least likely pairs", "clipctl data suspects a1f3"),
        (
            "Judge each fold by a model trained on the others, and write all pairs to edit",
            "clipctl data suspects a1f3 --folds 3 -o suspects.csv",
        ),
    ),
    "classify": (
        ("Is it a cat or a dog?", 'clipctl classify a1f3 photos --labels "cat,dog"'),
        (
            "The two best labels, with a caption for each, as CSV",
            'clipctl classify a1f3 photos --labels "cat,dog" --template "a photo of a {}" --top 2 --csv',
        ),
    ),
    "eval": (
        ("On the pictures that the run held out", "clipctl eval a1f3"),
        ("On other data", "clipctl eval a1f3 test.csv"),
        ("Is another run better?", "clipctl eval a1f3 --against b2e4"),
    ),
    "embed": (
        ("Make an index of a folder", "clipctl embed a1f3 photos -o photos.index"),
        ("Update it with the same command", "clipctl embed a1f3 photos -o photos.index"),
    ),
    "search": (
        ("Search a folder by words", 'clipctl search photos "a red boat" --model a1f3'),
        ("Search an index for pictures like this one", "clipctl search photos.index holiday.jpg"),
        (
            "A beach, but not at night, as a contact sheet",
            'clipctl search photos.index "a beach" --minus "at night" --sheet found.png',
        ),
    ),
    "browse": (
        ("Search an index in the browser", "clipctl browse photos.index"),
        ("Search a folder that has no index yet", "clipctl browse photos --model a1f3"),
    ),
    "bench": (
        ("Measure everything, in about two minutes", "clipctl bench"),
        ("Only operations of these sizes", "clipctl bench --sizes 1e6 1e7"),
        ("Training steps of a preset, at two batch sizes", "clipctl bench --model tiny --batch-sizes 8 16"),
        ("Keep the results for later", "clipctl bench --save before.json"),
    ),
    "doctor": (
        ("Check this machine", "clipctl doctor"),
        ("And the disk that runs are kept on", "clipctl doctor --runs-dir runs"),
        ("What to paste into a bug report", "clipctl doctor --issue"),
    ),
    "recommend-device": (
        ("Where to train 150 million parameters", "clipctl recommend-device --params 150M"),
        ("Time real steps of a preset first", "clipctl recommend-device --preset small --measure"),
        (
            "On a machine you do not have",
            "clipctl recommend-device --preset base --memory 8G --devices cpu mps",
        ),
    ),
    "monitor": (
        ("Watch the run in progress, else the latest one", "clipctl monitor"),
        ("Print the state of a run once", "clipctl monitor a1f3 --once"),
        ("Save the dashboard as a picture", "clipctl monitor --svg run.svg"),
    ),
    "report": (
        ("A run as one HTML file", "clipctl report a1f3 -o report.html"),
        ("Two runs compared", "clipctl report a1f3 b2e4 --no-pictures"),
        ("One plot", "clipctl report a1f3 --plot recall -o recall.png"),
    ),
    "runs": (
        ("List all runs", "clipctl runs"),
        ("The same for scripts", "clipctl runs --json"),
        ("How two of them differ", "clipctl runs compare a1f3 b2e4"),
        ("Export the metrics of one", "clipctl runs export a1f3 --to csv"),
    ),
    "runs rm": (
        ("What deleting a run would free", "clipctl runs rm a1f3"),
        ("Delete two", "clipctl runs rm a1f3 b2e4 --yes"),
    ),
    "runs rename": (
        ("Give a run a name to remember", "clipctl runs rename a1f3 first-try"),
        ("Or one with numbers", "clipctl runs rename a1f3 photos-2"),
    ),
    "runs compare": (
        ("Settings that differ, scores, speed and time of two runs", "clipctl runs compare a1f3 b2e4"),
        ("The same for scripts", "clipctl runs compare a1f3 b2e4 --json"),
    ),
    "runs export": (
        ("One CSV file per kind of metric", "clipctl runs export a1f3"),
        ("For TensorBoard", "clipctl runs export a1f3 --to tensorboard -o logs"),
    ),
    "stop": (
        ("Stop the run in progress", "clipctl stop"),
        ("Or one of several, by the end of its name", "clipctl stop a1f3"),
        ("Wait up to ten minutes for a slow step", "clipctl stop a1f3 --timeout 600"),
    ),
    "completion": (
        ("For bash, from the next terminal on", "clipctl completion bash >> ~/.bashrc"),
        ("For fish, in this terminal", "clipctl completion fish | source"),
    ),
    "help": (
        ("All commands", "clipctl help"),
        ("One command", "clipctl help checkpoint show"),
    ),
}
