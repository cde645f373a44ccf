"""The model card of a folder (README.md), and push: the folder on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from manyheads.common.errors import describe_error
from manyheads.common.json_files import read_json
from manyheads.common.types import JsonObject
from manyheads.common.whole_files import write_whole

CARD = "README.md"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def push(folder: str | PathLike[str], repo: str, *, private: bool = False) -> str:
    """Upload a folder that `save` or ``manyheads prune`` wrote to the Hugging Face hub.

    If the folder has no README.md, its model card is written first. Log in with
    ``hf auth login`` first.

    Parameters
    ----------
    folder: the folder.
    repo: ``owner/name``; it is created if there is none.
    private: whether a new one is private.

    Returns
    -------
    The address of the model.

    Raises
    ------
    ValueError if there is no such folder, or the hub cannot be reached, or refuses. The model card stays.

    See Also
    --------
    save : write the folder; ``card=True`` writes its model card.
    export : formats that run without manyheads.

    References
    ----------
    Mitchell et al. 2019, Model cards for model reporting.

    Examples
    --------
    >>> import manyheads as mh
    >>> mh.push("no/such/folder", "owner/name")
    Traceback (most recent call last):
    ValueError: folder: no/such/folder has no config.json; expected a folder that save or prune wrote
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() and not (folder / "heads.json").is_file():
        raise ValueError(f"folder: {folder} has no config.json; expected a folder that save or prune wrote")
    if not _HUB_NAME.fullmatch(repo):
        raise ValueError(f"repo: got {repo!r}; expected owner/name, as it is to be called on the hub")
    from huggingface_hub import HfApi

    if not (folder / CARD).is_file():
        write_card(folder, repo)
    try:
        api = HfApi()
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        api.upload_folder(folder_path=str(folder), repo_id=repo, commit_message="Upload with manyheads")
    except Exception as error:  # offline, refused, or not logged in
        raise ValueError(
            f"repo: {repo} was not pushed ({describe_error(error)}); its model card is {folder / CARD}"
        ) from error
    return address


def write_card(folder: Path, name: str | None = None, measured: Mapping[str, object] | None = None) -> None:
    """Write the model card of a folder.

    Parameters
    ----------
    folder: the folder, complete otherwise.
    name: of the model. Default: that of the folder.
    measured: what ``card.json`` holds, which is read if it is not passed: ``Card.as_json()`` of `card`,
        with the names of the uncut model (``model``) and of the text (``corpus``).
    """
    from huggingface_hub import ModelCard, ModelCardData

    record = _json(folder / "heads.json")
    facts = _json(folder / "card.json") if measured is None else dict(measured)
    name = folder.name if name is None else name
    kind = str(record.get("class", ""))
    is_transformers = kind.startswith("transformers.")
    base = str(facts.get("model", ""))
    data = ModelCardData(
        library_name="transformers" if is_transformers else "manyheads",
        tags=["manyheads", "attention-heads", "pruned"],
        base_model=base if _HUB_NAME.fullmatch(base) and not Path(base).exists() else None,
    )
    parts = [
        f"# {name.rpartition('/')[2]}",
        _cut(record, facts, base),
        _quality(facts),
        _export(facts),
        _heads(record),
    ]
    parts.append(
        _loading(name, kind.rpartition(".")[2] if is_transformers else "", bool(record.get("plain")))
    )
    body = "\n\n".join(filter(None, parts))
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")  # it raises if this is no card
    write_whole(folder / CARD, f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def _json(path: Path) -> JsonObject:
    return read_json(path, JsonObject, path.name) if path.is_file() else {}


def _cut(record: JsonObject, measured: JsonObject, base: str) -> str:
    counts = record.get("changes", {}).get("counts", {})
    before, after = (sum(count[when][0] for count in counts.values()) for when in ("before", "after"))
    if not counts:
        return "A model that was saved with [manyheads](https://pypi.org/project/manyheads)."
    of_base = f" of {base}" if base else ""
    if before == after:
        keys = [sum(count[when][1] for count in counts.values()) for when in ("before", "after")]
        sentence = f"{keys[0]} key and value heads{of_base} were merged to {keys[1]} with manyheads"
        return f"{sentence}." + (f" Fitted to {measured['corpus']}." if measured.get("corpus") else "")
    sentence = f"{before - after} of {before} attention heads{of_base}"
    text = f" Which ones was decided on {measured['corpus']}." if measured.get("corpus") else ""
    return f"{sentence} were removed with manyheads.{text}"


def _quality(measured: JsonObject) -> str:
    """A table of the model before and after."""
    before, after = measured.get("before"), measured.get("after")
    if not before or not after or not {"measure", "sequences"} <= set(measured):
        return ""
    rows = [
        (f"{measured['measure']}, {measured['sequences']:,} held-out sequences", "quality", "{:.4f}"),
        ("heads", "heads", "{:,}"),
        ("key and value heads", "key_heads", "{:,}"),
        ("parameters", "parameters", "{:,}"),
        ("bytes on disk", "bytes", "{:,}"),
        ("bytes of keys and values for each token", "cache", "{:,}"),
    ]
    lines = ["## Before and after", "", "| | before | after |", "|---|---|---|"]
    for what, key, form in rows:
        numbers = [side.get(key) for side in (before, after)]
        if any(numbers):
            cells = ["unknown" if number is None else form.format(number) for number in numbers]
            lines.append(f"| {what} | {' | '.join(cells)} |")
    for one in measured.get("decoding") or []:
        if not one["why_not"]:
            what = f"tokens a second, batch {one['batch']} after {one['length']:,} tokens"
            lines.append(f"| {what} | {one['before']:.1f} | {one['after']:.1f} |")
    return "\n".join(lines)


def _export(measured: JsonObject) -> str:
    """The files in another format that are beside the model."""
    export = measured.get("export")
    if not export:
        return ""
    files = [f"`{export['to']}/{name}`, {size:,} bytes" for name, size in export["bytes"].items()]
    error = max(export["differences"].values(), default=0.0)
    return (
        f"## As {export['to']}\n\n{'; '.join(files)}. Outputs differ from the model's by at most {error:.1g}."
    )


def _heads(record: JsonObject) -> str:
    removed = record.get("removed") or {}
    if not removed:
        return ""
    lines = ["## Heads that were removed", "", "| module | heads |", "|---|---|"]
    lines += [f"| `{site}` | {', '.join(map(str, heads))} |" for site, heads in removed.items()]
    return "\n".join(lines)


def _loading(name: str, kind: str, plain: bool) -> str:
    """How to load it with transformers, alone or after ``import manyheads``, and with manyheads."""
    quoted = json.dumps(name)
    snippets = [f"import manyheads as mh\n\nmodel = mh.open_model({quoted}, head=True).model"]
    if kind:
        load = f"from transformers import {kind}\n\nmodel = {kind}.from_pretrained({quoted})"
        first = "" if plain else "import manyheads  # from_pretrained needs it here\n"
        snippets.insert(0, first + load)
    return "\n\n".join(["## How to load it", *(f"```python\n{snippet}\n```" for snippet in snippets)])
