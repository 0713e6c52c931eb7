"""A prepare on its way: what was decided, written down so that any process can go on from there.

`DIR/.prepare/plan.json` is written before any shard; `DIR/.prepare/NNNNN.json` says that a shard is finished.
"""

import heapq
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from arriero.data.text.readers import MAX_BAD, NO_FILE, BadLimit, BadRecords, check_utf8, read_text_range
from arriero.data.text.sources import (
    ALL_FILES,
    DANGLING,
    Input,
    Select,
    TextSources,
    absolute,
    check_output_outside,
)
from arriero.data.text.synthetic import markov_text
from arriero.data.tokens.encoders import AUTO, EncoderChoice, choose_encoder
from arriero.data.tokens.tokenizer import (
    Mark,
    Separators,
    check_spelled_out,
    choose_separators,
    mark_special,
    parsed,
    read_definition,
    usual_end,
)
from arriero.errors import UserError
from arriero.files import publish_file, sha256_of, sha256_of_json

PIECES_PER_SHARD = 8
LARGEST_PIECE = 64_000_000
ONE_DOCUMENT = ("text", DANGLING)
UNPACKED = 4  # compressed text grows by about this much


class TextRange(NamedTuple):
    """`files` inputs from number `first` on; `begin` and `end` as `readers.read_text_range` takes them."""

    first: int
    files: int
    begin: int
    end: int
    bytes: int


def divide(inputs: Sequence[Input], shard_bytes: int, seed: int) -> list[list[TextRange]]:
    """The pieces of each shard. `shard_bytes` is text, estimated where a file is compressed."""
    pieces = _pieces(inputs, max(1, min(LARGEST_PIECE, shard_bytes // PIECES_PER_SHARD)))
    if not pieces:
        raise UserError("the sources hold no text", "check the paths; empty files have no documents")
    total = sum(piece.bytes for piece in pieces)
    count = min(len(pieces), max(1, round(total / shard_bytes)))
    shards: list[list[TextRange]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for piece in random.Random(seed).sample(pieces, len(pieces)):
        size, number = heapq.heappop(filled)
        shards[number].append(piece)
        heapq.heappush(filled, (size + piece.bytes, number))
    return shards


def _pieces(inputs: Sequence[Input], size: int) -> list[TextRange]:
    pieces: list[TextRange] = []
    for number, source in enumerate(inputs):
        if source.kind in ONE_DOCUMENT:
            _add_text(pieces, inputs, number, size)
        elif source.kind == "parquet":
            pieces += _row_groups(source, number, size)
        elif source.kind == "synthetic":
            pieces += _synthetic(source, number, size)
        elif source.compression or source.kind == "arrow":
            if source.size:
                pieces.append(TextRange(number, 1, 0, NO_FILE, _text_bytes(source)))
        else:
            cuts = _cuts(source.size, size)
            pieces += [TextRange(number, 1, a, b, b - a) for a, b in pairwise(cuts)]
    return pieces


def _text_bytes(source: Input) -> int:
    return source.size * (UNPACKED if source.compression else 1)


def _cuts(whole: int, size: int) -> list[int]:
    count = max(1, -(-whole // size))
    return [whole * i // count for i in range(count + 1)] if whole else []


def _add_text(pieces: list[TextRange], inputs: Sequence[Input], number: int, size: int) -> None:
    """Put the file to the piece before it while that stays small."""
    amount = _text_bytes(inputs[number])
    if pieces:
        last = pieces[-1]
        first = inputs[last.first]
        one_source = first.source == inputs[number].source
        adjoins = one_source and last.first + last.files == number and first.kind in ONE_DOCUMENT
        if adjoins and last.bytes + amount <= size:
            pieces[-1] = last._replace(files=last.files + 1, bytes=last.bytes + amount)
            return
    pieces.append(TextRange(number, 1, 0, NO_FILE, amount))


def _row_groups(source: Input, number: int, size: int) -> list[TextRange]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{source.path} is not a Parquet file ({reason})", "fetch or write it again"
        ) from None
    pieces: list[TextRange] = []
    for group, amount in enumerate(sizes):
        if pieces and pieces[-1].bytes + amount <= size:
            pieces[-1] = pieces[-1]._replace(end=group + 1, bytes=pieces[-1].bytes + amount)
        else:
            pieces.append(TextRange(number, 1, group, group + 1, amount))
    return pieces


def _synthetic(source: Input, number: int, size: int) -> list[TextRange]:
    each = markov_text().document_bytes
    cuts = _cuts(max(1, round(source.size / each)), max(1, int(size / each)))
    return [TextRange(number, 1, a, b, int((b - a) * each)) for a, b in pairwise(cuts)]


TOKENIZER = "tokenizer.json"
WORK = ".prepare"
PLAN = "plan.json"
SAMPLE_BYTES = 1_000_000
SAMPLED_SOURCES = 16
HOPELESS = 1000  # bad records from the beginning of a source on, and no usable one


@dataclass(frozen=True)
class PrepareRequest:
    """What the user asked for."""

    sources: tuple[str, ...]
    directory: Path
    tokenizer: Path
    column: str | None = None
    bos: str = "none"
    eos: str = "auto"
    seed: int = 1
    shard_bytes: int = 1_000_000_000
    skip_bad: bool = False
    literal_eos: bool = False
    max_bad: str = MAX_BAD
    columns: tuple[tuple[str, str], ...] = ()
    select: Select = ALL_FILES
    encoder: str = AUTO

    @cached_property
    def text(self) -> TextSources:
        return TextSources(self.sources, self.column, self.columns, self.select, self.skip_bad)

    @property
    def column_setting(self) -> str | dict[str, str]:
        plain = self.text.plain_column
        return {"*": plain, **{absolute(a): b for a, b in self.columns}} if self.columns else plain


@dataclass(frozen=True)
class Preparation:
    directory: Path
    settings: dict[str, Any]
    inputs: list[Input]
    shards: list[list[TextRange]]
    separators: Separators
    backend: EncoderChoice
    vocab_size: int
    eos_id: int
    text: TextSources

    @property
    def work(self) -> Path:
        return self.directory / WORK

    @cached_property
    def definition(self) -> str:
        return (self.work / TOKENIZER).read_text(encoding="utf-8")

    def shard_name(self, number: int) -> str:
        return f"{number:0{max(5, len(str(len(self.shards) - 1)))}d}"

    def shard_bytes(self, number: int) -> int:
        return sum(piece.bytes for piece in self.shards[number])

    def record_path(self, number: int) -> Path:
        return self.work / f"{self.shard_name(number)}.json"

    def unfinished(self) -> list[int]:
        done = {path.name for path in self.work.glob("*.json")}
        return [number for number in range(len(self.shards)) if self.record_path(number).name not in done]


def begin_or_resume(request: PrepareRequest, drafted: Preparation | None = None) -> Preparation:
    """The plan of this prepare, made now unless an interrupted one left it; a different one is refused."""
    if not (request.directory / WORK / PLAN).is_file():
        return _begin(request, drafted or draft(request))
    preparation = load_preparation(request)
    check_same_inputs(request, inputs_digest(preparation.inputs))
    return preparation


def load_preparation(request: PrepareRequest) -> Preparation:
    """What an earlier process decided; the inputs are looked at when they are read."""
    path = request.directory / WORK / PLAN
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "begin the prepare without --part first") from None
    check_same_settings(request, plan["settings"])
    return Preparation(
        directory=request.directory,
        settings=plan["settings"],
        inputs=[Input(*each) for each in plan["inputs"]],
        shards=[[TextRange(*piece) for piece in shard] for shard in plan["shards"]],
        separators=Separators(*(mark and Mark(*mark) for mark in plan["separators"])),
        backend=_resumed_backend(request, EncoderChoice(*plan["backend"])),
        vocab_size=plan["vocab_size"],
        eos_id=plan["eos_id"],
        text=request.text,
    )


def _resumed_backend(request: PrepareRequest, known: EncoderChoice) -> EncoderChoice:
    """All encoders give the same ids, so a resumed prepare may be told to use another."""
    if request.encoder in (AUTO, known.used):
        return known
    return choose_encoder(_tokenizer_of(request)[0], [], request.encoder)


def check_same_settings(request: PrepareRequest, known: dict[str, Any]) -> None:
    for name, value in _settings(request, *_tokenizer_of(request)).items():
        if known.get(name) != value:
            raise UserError(
                f"{request.directory} was begun with {name} {known.get(name)!r}, now it is {value!r}",
                "repeat the first command, or prepare into another directory",
            )


def check_same_inputs(request: PrepareRequest, known: str) -> None:
    if inputs_digest(request.text.find()) != known:
        raise UserError(
            f"{request.directory} was begun with other input files, or they have changed since",
            "restore the files, or prepare into another directory",
        )


def identity_of(request: PrepareRequest) -> str:
    """A hash of the inputs and of all settings that decide the bytes of the dataset."""
    settings = _settings(request, *_tokenizer_of(request))
    about = [inputs_digest(request.text.find()), settings]
    return sha256_of_json(about)


def inputs_digest(inputs: Sequence[Input]) -> str:
    """Of all but the number of the source, which earlier manifests do not have."""
    return sha256_of_json([each[:5] for each in inputs])


def draft(request: PrepareRequest) -> Preparation:
    """Everything that can be decided or refused before a file is written."""
    directory = request.directory
    check_output_outside(request.sources, directory)
    try:
        if directory.exists() and any(path.name != WORK for path in directory.iterdir()):
            raise UserError(f"{directory} is not empty", "prepare into a new directory")
    except NotADirectoryError:
        raise UserError(f"{directory} is a file", "prepare into a new directory") from None
    definition, separators = _tokenizer_of(request)
    inputs = request.text.find()
    if not request.skip_bad:
        check_utf8(inputs)
    shards = divide(inputs, request.shard_bytes, request.seed)
    sample = _first_texts(inputs, shards, request)
    if not request.literal_eos:
        check_spelled_out(separators, sample)
    end = separators.eos or usual_end(definition, request.tokenizer)
    return Preparation(
        directory=directory,
        settings=_settings(request, definition, separators),
        inputs=inputs,
        shards=shards,
        separators=separators,
        backend=choose_encoder(definition, sample, request.encoder),
        vocab_size=max(parsed(definition).get_vocab().values()) + 1,
        eos_id=end.id if end else 0,
        text=request.text,
    )


def _begin(request: PrepareRequest, preparation: Preparation) -> Preparation:
    definition, _ = _tokenizer_of(request)
    plan = {name: getattr(preparation, name) for name in _PLANNED}
    try:
        preparation.work.mkdir(parents=True, exist_ok=True)
        publish_file(preparation.work / TOKENIZER, definition.encode())
        publish_file(preparation.work / PLAN, json.dumps(plan).encode())
    except OSError as error:
        raise UserError(
            f"cannot write into {request.directory} ({error.strerror})", "prepare into another directory"
        ) from None
    return preparation


_PLANNED = ("settings", "inputs", "shards", "separators", "backend", "vocab_size", "eos_id")


def _tokenizer_of(request: PrepareRequest) -> tuple[str, Separators]:
    definition = read_definition(request.tokenizer)
    separators = choose_separators(definition, request.bos, request.eos, request.tokenizer)
    return mark_special(definition, [mark.token for mark in separators if mark]), separators


def _settings(request: PrepareRequest, definition: str, separators: Separators) -> dict[str, Any]:
    return {
        "tokenizer": sha256_of(definition.encode()),
        "column": request.column_setting,
        "bos": separators.bos and separators.bos.token,
        "eos": separators.eos and separators.eos.token,
        "seed": request.seed,
        "shard_bytes": request.shard_bytes,
    }


def _first_texts(inputs: list[Input], shards: list[list[TextRange]], request: PrepareRequest) -> list[str]:
    """About a megabyte of text, from the beginning of up to 16 sources, for the checks before the work."""
    by_source: dict[int, list[TextRange]] = {}
    for piece in sorted(piece for shard in shards for piece in shard):
        by_source.setdefault(inputs[piece.first].source, []).append(piece)
    numbers = list(by_source)[:: -(-len(by_source) // SAMPLED_SOURCES)]
    texts: list[str] = []
    for number in numbers:
        bad = BadRecords(request.skip_bad)
        texts += _beginning(inputs, by_source[number], request, SAMPLE_BYTES // len(numbers), bad)
        if bad.count >= HOPELESS and not bad.kept:
            BadLimit.parse(request.max_bad).refuse(request.sources[number], 0, bad.count, bad.examples[0])
    return texts


def _beginning(
    inputs: list[Input], pieces: Sequence[TextRange], request: PrepareRequest, left: int, bad: BadRecords
) -> Iterator[str]:
    for piece in pieces:
        files = inputs[piece.first : piece.first + piece.files]
        for batch in read_text_range(files, piece.begin, piece.end, request.text.column_of(files[0]), bad):
            bad.kept += len(batch.texts)
            for text in batch.texts:
                if left <= 0:
                    return
                yield text[-left:]
                left -= len(text)
            if bad.count >= HOPELESS:
                return


def sample_texts(
    text: TextSources,
    inputs: list[Input],
    limit_bytes: int,
    bad: dict[int, BadRecords],
    max_bad: BadLimit,
    seed: int = 1,
) -> Iterator[str]:
    """Documents from all over the sources until `limit_bytes` of text; `bad` counts them by source."""
    pieces = [piece for shard in divide(inputs, limit_bytes, seed) for piece in shard]
    taken = 0
    for piece in pieces:
        files = inputs[piece.first : piece.first + piece.files]
        each = bad.setdefault(files[0].source, BadRecords(text.skip_bad))
        for batch in read_text_range(files, piece.begin, piece.end, text.column_of(files[0]), each):
            each.kept += len(batch.texts)
            yield from batch.texts
            taken += batch.text_bytes
            if taken >= limit_bytes:
                break
        if taken >= limit_bytes:
            break
    for number, each in bad.items():
        max_bad.refuse(text.names[number], each.kept, each.count - each.links, "".join(each.examples[:1]))
