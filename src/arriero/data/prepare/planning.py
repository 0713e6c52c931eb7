"""Plan a prepare: check the request, divide the inputs over shards, and store the plan for any process to
use.

Big JSONL files are divided into byte ranges, Parquet into row groups; small text files are grouped. The
ranges are shuffled and distributed over the shards, so each shard mixes the inputs and its bytes do not
depend on the process that makes it. `DIR/.prepare/plan.json` is written before any shard;
`DIR/.prepare/NNNNN.json` marks a finished shard.
"""

import heapq
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from arriero.data.store.manifest import PLAN, WORK
from arriero.data.text.builtin import markov_text
from arriero.data.text.formats import PromptTemplate, read_chat_template
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
from arriero.data.tokens.encoders import AUTO, EncoderChoice, choose_encoder
from arriero.data.tokens.marked import chat_separators, special_tokens
from arriero.data.tokens.tokenizer import (
    Separators,
    SpecialToken,
    check_spelled_out,
    choose_separators,
    mark_special,
    parsed,
    read_definition,
    usual_end,
)
from arriero.errors import UserError
from arriero.files import publish_file, sha256_of, sha256_of_json

TOKENIZER = "tokenizer.json"
SAMPLE_BYTES = 1_000_000
SAMPLED_SOURCES = 16
HOPELESS = 1000  # bad records from the beginning of a source on, and no usable one
RANGES_PER_SHARD = 8
LARGEST_RANGE = 64_000_000
ONE_DOCUMENT = ("text", DANGLING)
UNPACKED = 4  # compressed text grows by about this factor


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
    templates: tuple[tuple[str, str], ...] = ()
    chat: Literal[False] | Path | None = False

    @cached_property
    def text(self) -> TextSources:
        """Return how the sources are read. `chat` is False, or the file of a chat template, None for the
        tokenizer's own."""
        chat = None
        if self.chat is not False:
            special = special_tokens(read_definition(self.tokenizer))
            chat = read_chat_template(self.tokenizer, self.chat, special)
            chat = replace(chat, column=self.column or chat.column)
        templates = tuple((place, PromptTemplate(each)) for place, each in self.templates)
        return TextSources(
            self.sources, self.column, self.columns, self.select, self.skip_bad, templates, chat
        )

    @property
    def column_setting(self) -> str | dict[str, str]:
        plain = self.text.plain_column
        return {"*": plain, **{absolute(a): b for a, b in self.columns}} if self.columns else plain

    def command(self) -> list[str]:
        """Return the arguments of `arriero` that make this request in any working directory."""
        columns = [*([self.column] if self.column else []), *(f"{absolute(a)}={b}" for a, b in self.columns)]
        repeated = {"--column": columns, "--include": self.select.include, "--exclude": self.select.exclude}
        options = {
            "-o": self.directory.absolute(),
            "--tokenizer": self.tokenizer.absolute(),
            "--as": self.select.read_as,
            "--bos": self.bos,
            "--eos": self.eos,
            "--encoder": self.encoder,
            "--seed": self.seed,
            "--shard-size": f"{self.shard_bytes}B",
        }
        return [
            *("data", "prepare", *map(absolute, self.sources)),
            *(word for name, values in repeated.items() for value in values for word in (name, value)),
            *(str(word) for option in options.items() for word in option),
            *(("--skip-bad", "--max-bad", self.max_bad) if self.skip_bad else ()),
            *(("--literal-eos",) if self.literal_eos else ()),
            *(word for place, each in self.templates for word in ("--template", _placed(place, each))),
            *(("--chat",) if self.chat is None else ()),
            *(("--chat-template", str(self.chat.absolute())) if isinstance(self.chat, Path) else ()),
        ]


def _placed(place: str, value: str) -> str:
    return f"{absolute(place)}={value}" if place else value


class TextRange(NamedTuple):
    """`files` inputs from number `first` on; `begin` and `end` as `readers.read_text_range` takes them."""

    first: int
    files: int
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class Preparation:
    """The plan of a prepare: its inputs, the text ranges of each shard, and every derived setting."""

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
        return sum(part.bytes for part in self.shards[number])

    def record_path(self, number: int) -> Path:
        return self.work / f"{self.shard_name(number)}.json"

    def unfinished(self) -> list[int]:
        done = {path.name for path in self.work.glob("*.json")}
        return [number for number in range(len(self.shards)) if self.record_path(number).name not in done]


def begin_or_resume(request: PrepareRequest, drafted: Preparation | None = None) -> Preparation:
    """Store a new plan, or load the one of an interrupted prepare if it was made for the same request."""
    if not (request.directory / WORK / PLAN).is_file():
        return _begin(request, drafted or draft(request))
    preparation = load_preparation(request)
    check_same_inputs(request, inputs_digest(preparation.inputs))
    return preparation


def load_preparation(request: PrepareRequest) -> Preparation:
    """Load the plan of an earlier process; inputs are compared with it when they are read."""
    path = request.directory / WORK / PLAN
    try:
        plan = json.loads(path.read_bytes())
        found = Preparation(
            directory=request.directory,
            settings=plan["settings"],
            inputs=[Input(*each) for each in plan["inputs"]],
            shards=[[TextRange(*part) for part in shard] for shard in plan["shards"]],
            separators=Separators(*(token and SpecialToken(*token) for token in plan["separators"])),
            backend=EncoderChoice(*plan["backend"]),
            vocab_size=plan["vocab_size"],
            eos_id=plan["eos_id"],
            text=request.text,
        )
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "begin the prepare without --part first") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        todo = f"remove {request.directory} and begin the prepare again"
        raise UserError(f"{path} is damaged ({type(error).__name__})", todo) from None
    check_same_settings(request, found.settings)
    if request.encoder not in (AUTO, found.backend.used):  # all encoders give the same ids
        backend = choose_encoder(_tokenizer_of(request)[0], [], request.encoder)
        found = replace(found, backend=backend)
    return found


def check_same_settings(request: PrepareRequest, known: dict[str, Any]) -> None:
    settings = _settings(request, *_tokenizer_of(request))
    for name in known | settings:
        value = settings.get(name)
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
    """Return a hash of the inputs and of all settings that decide the bytes of the dataset."""
    return sha256_of_json([inputs_digest(request.text.find()), _settings(request, *_tokenizer_of(request))])


def inputs_digest(inputs: Sequence[Input]) -> str:
    """Return a hash of the inputs without the number of the source, which old manifests do not have."""
    return sha256_of_json([each[:5] for each in inputs])


def draft(request: PrepareRequest) -> Preparation:
    """Decide everything that can be decided, and raise every UserError, before a file is written."""
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
    chat = request.text.chat
    shown = separators if chat is None else chat_separators(chat, definition)
    end = shown.eos or usual_end(definition, request.tokenizer)
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
    plan = {name: getattr(preparation, name) for name in _PLANNED} | {"command": request.command()}
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
    if request.chat is not False:
        return definition, Separators(None, None)
    separators = choose_separators(definition, request.bos, request.eos, request.tokenizer)
    return mark_special(definition, [token.token for token in separators if token]), separators


def _settings(request: PrepareRequest, definition: str, separators: Separators) -> dict[str, Any]:
    return {
        "tokenizer": sha256_of(definition.encode()),
        "column": request.column_setting,
        "bos": separators.bos and separators.bos.token,
        "eos": separators.eos and separators.eos.token,
        "seed": request.seed,
        "shard_bytes": request.shard_bytes,
        **({"templates": [list(each) for each in request.templates]} if request.templates else {}),
        **({"chat_template": request.text.chat.template} if request.text.chat else {}),
    }


def divide(inputs: Sequence[Input], shard_bytes: int, seed: int) -> list[list[TextRange]]:
    """Return the text ranges of each shard. `shard_bytes` is text, estimated where a file is compressed."""
    ranges = _ranges(inputs, max(1, min(LARGEST_RANGE, shard_bytes // RANGES_PER_SHARD)))
    if not ranges:
        raise UserError("the sources hold no text", "check the paths; empty files have no documents")
    total = sum(part.bytes for part in ranges)
    count = min(len(ranges), max(1, round(total / shard_bytes)))
    shards: list[list[TextRange]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for part in random.Random(seed).sample(ranges, len(ranges)):
        size, number = heapq.heappop(filled)
        shards[number].append(part)
        heapq.heappush(filled, (size + part.bytes, number))
    return shards


def _ranges(inputs: Sequence[Input], size: int) -> list[TextRange]:
    ranges: list[TextRange] = []
    for number, source in enumerate(inputs):
        if source.kind in ONE_DOCUMENT:
            _add_text(ranges, inputs, number, size)
        elif source.kind == "parquet":
            ranges += _row_groups(source, number, size)
        elif source.kind == "synthetic":
            each = markov_text().document_bytes
            cuts = _cuts(max(1, round(source.size / each)), max(1, int(size / each)))
            ranges += [TextRange(number, 1, a, b, int((b - a) * each)) for a, b in pairwise(cuts)]
        elif source.compression or source.kind == "arrow":
            if source.size:
                ranges.append(TextRange(number, 1, 0, NO_FILE, _text_bytes(source)))
        else:
            cuts = _cuts(source.size, size)
            ranges += [TextRange(number, 1, a, b, b - a) for a, b in pairwise(cuts)]
    return ranges


def _text_bytes(source: Input) -> int:
    return source.size * (UNPACKED if source.compression else 1)


def _cuts(whole: int, size: int) -> list[int]:
    count = max(1, -(-whole // size))
    return [whole * i // count for i in range(count + 1)] if whole else []


def _add_text(ranges: list[TextRange], inputs: Sequence[Input], number: int, size: int) -> None:
    """Add a file to the range before it while that stays small, else as a range of its own."""
    amount = _text_bytes(inputs[number])
    if ranges:
        last = ranges[-1]
        first = inputs[last.first]
        one_source = first.source == inputs[number].source
        adjoins = one_source and last.first + last.files == number and first.kind in ONE_DOCUMENT
        if adjoins and last.bytes + amount <= size:
            ranges[-1] = last._replace(files=last.files + 1, bytes=last.bytes + amount)
            return
    ranges.append(TextRange(number, 1, 0, NO_FILE, amount))


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
    ranges: list[TextRange] = []
    for group, amount in enumerate(sizes):
        if ranges and ranges[-1].bytes + amount <= size:
            ranges[-1] = ranges[-1]._replace(end=group + 1, bytes=ranges[-1].bytes + amount)
        else:
            ranges.append(TextRange(number, 1, group, group + 1, amount))
    return ranges


def _first_texts(inputs: list[Input], shards: list[list[TextRange]], request: PrepareRequest) -> list[str]:
    """Read about a megabyte of text from the beginning of up to 16 sources, to check it before the work."""
    by_source: dict[int, list[TextRange]] = {}
    for part in sorted(part for shard in shards for part in shard):
        by_source.setdefault(inputs[part.first].source, []).append(part)
    numbers = list(by_source)[:: -(-len(by_source) // SAMPLED_SOURCES)]
    texts: list[str] = []
    for number in numbers:
        bad = BadRecords(request.skip_bad)
        texts += _beginning(inputs, by_source[number], request, SAMPLE_BYTES // len(numbers), bad)
        if bad.count >= HOPELESS and not bad.kept:
            BadLimit.parse(request.max_bad).check(request.sources[number], 0, bad.count, bad.examples[0])
    return texts


def _beginning(
    inputs: list[Input], ranges: Sequence[TextRange], request: PrepareRequest, left: int, bad: BadRecords
) -> Iterator[str]:
    for part in ranges:
        files = inputs[part.first : part.first + part.files]
        for batch in read_text_range(files, part.begin, part.end, request.text.format_of(files[0]), bad):
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
    """Yield documents from all parts of the sources up to `limit_bytes`; `bad` counts them by source."""
    taken = 0
    for part in (part for shard in divide(inputs, limit_bytes, seed) for part in shard):
        if taken >= limit_bytes:
            break
        files = inputs[part.first : part.first + part.files]
        each = bad.setdefault(files[0].source, BadRecords(text.skip_bad))
        for batch in read_text_range(files, part.begin, part.end, text.format_of(files[0]), each):
            each.kept += len(batch.texts)
            yield from batch.texts
            taken += batch.text_bytes
            if taken >= limit_bytes:
                break
    for number, each in bad.items():
        max_bad.check(text.names[number], each.kept, each.count - each.links, "".join(each.examples[:1]))
