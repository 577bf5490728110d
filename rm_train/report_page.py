"""The HTML of a run's report: one file that needs nothing else.

Invariant: every text of the data is escaped, and with ``text=False`` no word of prompts or answers is in the page.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rm_train.report_plots import by_group
from rm_train.run_directory import Run

_MISTAKES = 20
_LONGEST_TEXT = 3000

_STYLE = Path(__file__).with_name("report.css")


def page(run: Run, plots: Sequence[tuple[str, str, bytes]], *, text: bool) -> str:
    """The whole page. ``plots`` are (name, what it shows, PNG)."""
    style = _STYLE.read_text(encoding="utf-8")
    pictures = {name: _picture(words, png) for name, words, png in plots}
    name = str(run.config["run"]["name"])
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="faint">{escape(_subtitle(run))}</p>',
        _key_numbers(run),
        _verdict(run),
        _section("Training", _grid(pictures, "loss", "accuracy", "optimisation")),
        _section("Rewards", _grid(pictures, "rewards", "margins", "reliability", "length") + _reward_notes(run)),
        _section("Accuracy against the baselines", _grid(pictures, "categories") + _groups(run)),
        _section("What the data doctor found", _findings(run)),
        _section("Worst mistakes", _mistakes(run, text)),
        _section("What was trained on what", _facts(_setup(run))),
        _section("How to serve it", _serving(run)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)} · reward model report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def _picture(words: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<figure><img alt="{escape(words)}" src="data:image/png;base64,{data}"></figure>'


def _grid(pictures: dict[str, str], *names: str) -> str:
    found = [pictures[name] for name in names if name in pictures]
    return f'<div class="plots">{"".join(found)}</div>' if found else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of escaped cells; on a phone each row becomes a block of named values."""
    titles = "".join(f"<th{_right(i, numbers)}>{escape(title)}</th>" for i, title in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{_right(i, numbers)}{f""" data-name="{escape(head[i])}" """ if i else ""}>{escape(cell)}</td>'
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="stack"><tr>{titles}</tr>{body}</table></div>'


def _right(index: int, numbers: Sequence[int]) -> str:
    return ' class="n"' if index in numbers else ""


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<table class="facts">{body}</table>'


# ------------------------------------------------------------------ parts


def _subtitle(run: Run) -> str:
    base = run.config["model"]["base"]
    if run.record is None:
        return f"Reward model on {base}; the run is not finished: there is no checkpoint"
    return f"Reward model on {base} · {run.record.created:%Y-%m-%d %H:%M} UTC · {run.record.reward_id}"


def _key_numbers(run: Run) -> str:
    cards: list[tuple[str, str]] = []
    if run.record is not None and run.record.metrics:
        found = run.record.metrics
        accuracy = found["accuracy"]
        cards += [
            (f"{accuracy['value']:.3f}", f"accuracy, 95 % interval {accuracy['low']:.3f} to {accuracy['high']:.3f}"),
            (f"{found['longer_wins']:.3f}", "if the longer answer won"),
        ]
        if found.get("bag_of_words") is not None:
            cards.append((f"{found['bag_of_words']:.3f}", "bag of words, same pairs"))
        cards += [
            (f"{found['log_loss']:.3f}", "log-loss (0.693 knows nothing)"),
            (f"{found['pairs']:,}", "evaluation pairs"),
        ]
    if run.steps:
        last = run.steps[-1]
        cards.append(
            (f"{last['step']:,}", "steps" + (f" in {_duration(last['seconds'])}" if "seconds" in last else ""))
        )
    body = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    return f'<div class="cards">{body}</div>' if cards else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _verdict(run: Run) -> str:
    if run.record is None or not run.record.metrics:
        return ""
    found = run.record.metrics
    low = found["accuracy"]["low"]
    rivals = {"always preferring the longer answer": found["longer_wins"], "the shorter one": found["shorter_wins"]}
    if found.get("bag_of_words") is not None:
        rivals["a bag of words"] = found["bag_of_words"]
    best = max(rivals, key=lambda name: rivals[name])
    good = low > rivals[best]
    text = (
        f"Better than every baseline: the interval begins at {low:.3f}, the strongest of them ({best}) reaches "
        f"{rivals[best]:.3f}."
        if good
        else f"Not shown to be better than a baseline: {best} reaches {rivals[best]:.3f}, and the interval of this "
        f"model's accuracy begins at {low:.3f}."
    )
    return f'<p class="verdict{"" if good else " bad"}">{escape(text)}</p>'


def _reward_notes(run: Run) -> str:
    if run.record is None or not run.record.metrics:
        return ""
    found, length = run.record.metrics, run.record.metrics["length"]
    calibration = found["calibration"]

    def share(part: dict[str, Any]) -> str:
        return "–" if part["accuracy"] is None else f"{part['accuracy']:.3f} ({part['pairs']} pairs)"

    rows = [
        ("reward", f"mean {run.record.reward_mean:.4g}, standard deviation {run.record.reward_std:.4g}"),
        ("mean margin", f"{found['reward']['mean_margin']:.4g}"),
        (
            "temperature",
            f"{run.record.temperature:.4g}; with it, log-loss {calibration['log_loss']:.4f} and expected calibration "
            f"error {calibration['expected_error']:.4f}",
        ),
        (
            "correlation of reward and length",
            "–" if length["reward_correlation"] is None else f"{length['reward_correlation']:.3f}",
        ),
        ("accuracy, chosen longer", share(length["chosen_longer"])),
        ("accuracy, chosen shorter", share(length["chosen_shorter"])),
        ("accuracy, equal length within 10 %", share(length["matched"])),
    ]
    if heads := found.get("heads"):

        def number(value: float | None) -> str:
            return "–" if value is None else f"{value:.4g}"

        rows += [
            ("spread of the heads", f"{heads['mean_std']:.4g} a reward, on average"),
            (
                "spread of a pair's margin",
                f"{number(heads['margin_std_right'])} where right, {number(heads['margin_std_wrong'])} where wrong",
            ),
            ("accuracy of the surer half", f"{heads['accuracy_of_surer_half']:.3f}"),
            ("accuracy of mean − std", f"{heads['accuracy_mean_minus_std']:.3f}"),
        ]
    return _facts(rows)


def _groups(run: Run) -> str:
    tables = []
    for name in ("category", "source"):
        rows = by_group(run, name)
        if not rows or (name == "source" and len(rows) < 2):
            continue
        cells = [
            (group, f"{pairs:,}", f"{accuracy:.3f}", f"{longer:.3f}", "–" if words is None else f"{words:.3f}")
            for group, pairs, accuracy, longer, words in rows
        ]
        tables.append(_table([name, "pairs", "accuracy", "longer wins", "bag of words"], cells, (1, 2, 3, 4)))
    return "".join(tables)


def _findings(run: Run) -> str:
    if run.check is None:
        return ""
    counts = f"{run.check['train_pairs']:,} training and {run.check['eval_pairs']:,} evaluation pairs"
    if not run.check["findings"]:
        return f"<p>Nothing, in {counts}.</p>"
    rows = [
        (
            finding["kind"],
            finding["severity"],
            f"{finding['count']:,} ({finding['count'] / max(finding['total'], 1):.1%})",
            finding["meaning"],
            ", ".join(example["where"] for example in finding["examples"][:3]),
        )
        for finding in run.check["findings"]
    ]
    return f"<p>In {counts}:</p>" + _table(["kind", "severity", "pairs", "what it means", "first places"], rows, (2,))


def _mistakes(run: Run, text: bool) -> str:
    if not run.pairs:
        return ""
    wrong = [pair for pair in run.pairs if pair["chosen"] <= pair["rejected"] and pair.get("label") != 0.5]
    wrong.sort(key=_margin)
    if not wrong:
        return "<p>None: every chosen answer has the higher reward.</p>"
    head = f"<p>{len(wrong):,} of {len(run.pairs):,} pairs have no higher reward for the chosen answer. "
    head += f"The {min(_MISTAKES, len(wrong))} furthest off:</p>"
    if not text:
        rows = [
            (pair["where"], pair.get("category") or "–", f"{pair['chosen']:.3f}", f"{pair['rejected']:.3f}")
            for pair in wrong[:_MISTAKES]
        ]
        return head + _table(["place", "category", "chosen", "rejected"], rows, (2, 3))
    return head + "".join(_mistake(pair) for pair in wrong[:_MISTAKES])


def _margin(pair: dict[str, Any]) -> float:
    return float(pair["chosen"] - pair["rejected"])


def _mistake(pair: dict[str, Any]) -> str:
    texts = pair.get("text") or {}
    sides = "".join(
        f'<div><div class="label">{name}: {pair[name]:.3f}</div>'
        f'<div class="text">{_cut(texts.get(name, ""))}</div></div>'
        for name in ("chosen", "rejected")
    )
    notes = [pair["where"], *([pair["category"]] if pair.get("category") else []), f"margin {_margin(pair):.3f}"]
    prompt = f'<div class="text">{_cut(texts["prompt"])}</div>' if texts.get("prompt") else ""
    return (
        f'<div class="mistake"><div class="faint">{escape(" · ".join(notes))}</div>{prompt}'
        f'<div class="pair">{sides}</div></div>'
    )


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return escape(text)
    # the end is what is scored: of a long text the middle goes
    half = _LONGEST_TEXT // 2
    return escape(f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}")


def _setup(run: Run) -> list[tuple[str, str]]:
    config, record = run.config, run.record
    model, train, loss, lora = config["model"], config["train"], config["loss"], config["lora"]
    data = record.data if record else {}
    rows = [("base model", model["base"] + (f" ({model['revision']})" if model["revision"] else ""))]
    if lora is None:
        rows.append(("trained", "all weights"))
    else:
        rows.append(("trained", f"LoRA, rank {lora['r']}, alpha {lora['alpha']:g}, dropout {lora['dropout']:g}"))
    rows.append(("training data", ", ".join(source["path"] for source in config["data"]["train"])))
    held_out = config["data"]["eval"]
    rows.append(
        (
            "evaluation data",
            ", ".join(source["path"] for source in held_out)
            if held_out
            else f"{config['data']['eval_fraction']:.0%} of the training pairs, whole prompts",
        )
    )
    if data:
        cut = data.get("truncated", {})
        rows.append(("pairs", f"{data['train_pairs']:,} training, {data['eval_pairs']:,} evaluation"))
        rows.append(
            ("cut to the maximum length", f"{cut.get('train', 0):,} training, {cut.get('eval', 0):,} evaluation")
        )
    rows += [
        ("maximum length", f"{model['max_length']:,} tokens"),
        (
            "loss",
            "Bradley-Terry"
            + (f", label smoothing {loss['label_smoothing']:g}" if loss["label_smoothing"] else "")
            + (", with margins" if loss["use_margin"] else "")
            + (f", centring {loss['centering']:g}" if loss["centering"] else ""),
        ),
        (
            "optimisation",
            f"AdamW, learning rate {train['learning_rate']:g}, {train['schedule']}, "
            + f"{train['batch_size']} pairs a step, "
            + (f"{train['max_steps']} steps" if train["max_steps"] else f"{train['epochs']} epoch(s)"),
        ),
        ("seed", str(config["run"]["seed"])),
    ]
    if record is not None:
        rows.append(("computed in", f"{record.numerics.get('dtype')} on {record.numerics.get('device')}"))
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())))
        if record.git_revision:
            rows.append(("git revision", record.git_revision))
    return rows


def _serving(run: Run) -> str:
    if run.record is None:
        return "<p>There is no checkpoint yet. <code>rm-train fit CONFIG.yaml --resume</code> goes on.</p>"
    checkpoint, rules = str(run.directory / "checkpoint"), run.record.rules
    commands = (
        f"rm-server {checkpoint}\n"
        "curl -s localhost:8000/score -H 'content-type: application/json' \\\n"
        '  -d \'{"prompt": "…", "completions": ["…", "…"], "reward_id": "' + run.record.reward_id + "\"}'"
    )
    rows = [
        ("strings", "as they are" if rules.text_as == "raw" else "one user and one assistant turn"),
        ("messages", "through the chat template" if rules.chat_template else "not possible: there is no chat template"),
        ("a chat ends at", f"{rules.end_of_turn!r}" if rules.end == "token" else "the template's end"),
        ("a text ends at", f"{rules.end_of_text!r}" if rules.end_of_text else "the tokenizer's own end"),
        ("reward", "the raw logit, at the last token"),
    ]
    return f"<pre>{escape(commands)}</pre>{_facts(rows)}"
