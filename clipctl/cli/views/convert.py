"""Displays what was imported or exported, and the proof that it computes the same."""

from typing import Any

from rich.text import Text

from clipctl.cli.output import aligned, plain
from clipctl.cli.views import units

CLOSE = 1e-4  # logits that differ by less are the same


def imported_text(facts: dict[str, Any]) -> Text:
    lines = [
        f"{units.count(facts['parameters'])} parameters: image {facts['image']}, text {facts['text']}, "
        f"{facts['activation']}",
        f"saved in {facts['path']}",
        "",
        f"  clipctl search photos 'a red boat' --model {facts['path']}",
        f"  clipctl train photos --from {facts['path']}",
    ]
    return plain("\n".join(lines))


def merged_text(document: dict[str, Any]) -> Text:
    lines = []
    scored = [row for row in document["results"] if "score" in row]
    if scored:
        rows = [("alpha", "R@1", "picture to caption", "caption to picture", "")]
        for row in scored:
            alpha = "average" if row["alpha"] is None else f"{row['alpha']:g}"
            ends = {0.0: document["models"][0], 1.0: document["models"][-1]}.get(row["alpha"], "")
            shares = (f"{100 * row[key]:.1f} %" for key in ("score", "i2t_r1", "t2i_r1"))
            mark = "best" if row["alpha"] == document["alpha"] and len(scored) > 1 else ""
            rows.append((alpha, *shares, " ".join(filter(None, (mark, ends)))))  # type: ignore[arg-type]
        lines += [plain(f"{' and '.join(document['models'][:3])} on {document['data']}:"), aligned(rows)]
    if len(scored) > 1:
        lines.append(plain("the best was chosen on these pictures: judge it on others"))
    if document["path"]:
        lines.append(plain(f"saved in {document['path']}"))
    return Text("\n").join(lines)


def exported_text(document: dict[str, Any]) -> Text:
    first = plain(f"{document['model']} written to {document['path']} ({units.size(document['size_bytes'])})")
    rows = [("compared with", "image", "text", "logits", "")]
    for proof in document["proofs"]:
        if proof["missing"]:
            rows.append((proof["library"], "–", "–", "–", f"not compared: {proof['missing']}"))
        else:
            differences = (f"{proof[key]:.1e}" for key in ("image", "text", "logits"))
            verdict = "the same" if proof["logits"] <= CLOSE else "NOT the same"
            rows.append((f"{proof['library']} {proof['version']}", *differences, verdict))  # type: ignore[arg-type]
    if len(rows) == 1:
        return first
    return Text("\n").join([first, plain("largest differences, on picture files and captions:"), aligned(rows)])
