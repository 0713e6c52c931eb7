"""A prepared dataset in other systems' layouts; where those are raw tokens too, as links."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from arriero.data.exchange import columns, raw
from arriero.data.exchange.importing import FORMATS
from arriero.data.store.index import index_problems, read_index
from arriero.data.store.links import Link, place
from arriero.data.store.scan import Advance, unseen
from arriero.data.store.shards import room_for
from arriero.data.store.staging import staged_directory
from arriero.data.store.store import TokenStore
from arriero.errors import UserError


@dataclass
class Exported:
    """`kept_eos` counts fms-arrow files that hold their separators, since not every document has one."""

    files: int = 0
    placed: Counter[str] = field(default_factory=Counter)
    kept_eos: int = 0
    empty: int = 0


def export_dataset(
    store: TokenStore,
    format: str,
    target: Path,
    *,
    column: str = columns.HF_COLUMN,
    link: Link = "auto",
    advance: Advance = unseen,
) -> Exported:
    if format not in FORMATS:
        raise UserError(f"'{format}' is not a format of token files", f"choose one of {', '.join(FORMATS)}")
    made = Exported()
    counts = ["dataset/filename,documents,tokens"]
    rewritten = format not in raw.SUFFIX or link == "copy"
    least = store.tokens * store.dtype.itemsize // 2 if rewritten else 0
    with room_for(target, least), staged_directory(target) as making:
        folder = making / _fms_folder(store.directory) if format == "fms-arrow" else making
        folder.mkdir(exist_ok=True)
        for number in range(store.shards):
            shard = _Shard(store, number)
            made.empty += int((shard.lengths == 0).sum())
            if format in raw.SUFFIX:
                made.placed[_link_raw(shard, format, folder, link)] += 1
            elif format == "hf-parquet":
                path = folder / f"data-{number:05d}-of-{store.shards:05d}.parquet"
                columns.write_parquet(path, shard.ids, shard.lengths, column)
            else:
                strip = shard.all_end_with(store.eos_id)
                made.kept_eos += not strip
                tokens = columns.write_arrow(folder / f"{shard.name}.arrow", shard.ids, shard.lengths, strip)
                counts.append(f"/{folder.name}/{shard.name}.arrow,{len(shard.lengths)},{tokens}")
            made.files += 1
            advance(shard.bin.stat().st_size)
        if format == "fms-arrow":
            (making / "meta").mkdir()
            (making / "meta" / f"{folder.name}_counts.csv").write_text("\n".join(counts) + "\n")
    return made


def _fms_folder(directory: Path) -> str:
    """fms-fsdp passes over folders with "meta" in their name."""
    name = directory.resolve().name
    return "tokens" if "meta" in name else name


class _Shard:
    def __init__(self, store: TokenStore, number: int) -> None:
        self.store = store
        self.name = store.shard_path(number).name
        self.bin, self.idx = store.shard_path(number, ".bin"), store.shard_path(number, ".idx")
        index = read_index(self.idx)
        tokens = store.shard_tokens(number)
        problems = index_problems(index)
        if not self.bin.is_file() or self.bin.stat().st_size != tokens * store.dtype.itemsize:
            problems.append(f"{self.bin.name} does not have {tokens} tokens")
        if index.tokens != tokens or len(index.lengths) != store.shard_documents(number):
            problems.append("the manifest counts other tokens or documents")
        if problems:
            raise UserError(f"{self.idx}: {problems[0]}", f"see `arriero data verify {store.directory}`")
        self.lengths = np.asarray(index.lengths)
        self.ids = np.memmap(self.bin, dtype=store.dtype, mode="r") if tokens else np.empty(0, store.dtype)

    def all_end_with(self, eos_id: int) -> bool:
        last = np.cumsum(self.lengths, dtype=np.int64) - 1
        return bool((self.lengths > 0).all() and (self.ids[last] == eos_id).all()) if len(last) else True


def _link_raw(shard: _Shard, format: str, folder: Path, link: Link) -> str:
    target = folder / f"{shard.name}{raw.SUFFIX[format]}"
    how = place(shard.bin, target, link)
    if format == "megatron":
        place(shard.idx, target.with_suffix(".idx"), link)
    elif format == "datatrove":
        raw.write_ds_index(target, shard.lengths, str(shard.store.tokenizer_path), shard.store.dtype.itemsize)
    else:
        raw.write_csv_index(target, shard.lengths)
    return how
