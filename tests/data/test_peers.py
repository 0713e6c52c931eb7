"""The peers' own readers and writers judge our files."""

import numpy as np
from exchange_corpora import EOS, LARGE, SMALL, documents_of, make_dataset, tokenizer_file
from peer_python import ask_peer, peer_python

from arriero.data.exchange import Import, export_dataset
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import load_tokenizer

READ_MEGATRON = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
read = []
for prefix in sys.argv[1:]:
    for mapped in (True, False):
        dataset = IndexedDataset(prefix, mmap=mapped)
        documents = [dataset[i].tolist() for i in range(len(dataset))]
        read.append([documents, dataset.document_indices.tolist(), dataset.index.dtype.__name__])
print(json.dumps(read))
"""

WRITE_MEGATRON = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
for dtype in (numpy.uint16, numpy.int32):
    prefix = f"{sys.argv[1]}/{dtype.__name__}"
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    builder.add_document(torch.tensor([5, 6, 7, 0]), [2, 2])
    builder.add_item(torch.tensor([8, 0]))
    builder.end_document()
    builder.finalize(prefix + ".idx")
print("null")
"""

READ_DATATROVE = """
import json, sys
from datatrove.utils.dataset import DatatroveFileDataset
read = []
for path, size in zip(sys.argv[1::2], sys.argv[2::2]):
    dataset = DatatroveFileDataset(path, seq_len=4, token_size=int(size), return_positions=True)
    rows = [dataset[i] for i in range(len(dataset))]
    read.append([[row["input_ids"].tolist(), row["positions"].tolist()] for row in rows])
print(json.dumps(read))
"""

WRITE_DATATROVE = """
import sys
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
step = DocumentTokenizer(sys.argv[1], tokenizer_name_or_path=sys.argv[2], eos_token="<|end|>",
                         shuffle_documents=False)
step.run((Document(text=text, id=text) for text in ("w5 w6", "w7", "w8 w9 w10")), rank=0, world_size=1)
print("null")
"""

WIDTHS = {"uint16": SMALL, "int32": LARGE}
DOCUMENTS = [[5, 6, EOS], [EOS], [], [7, EOS], [8, 9, 10, 11, 12, 13, 999, EOS]]


def test_megatron_core_opens_prepared_and_exported_shards(tmp_path):
    python = peer_python("megatron.core", "torch")
    places = []
    for dtype, vocab_size in WIDTHS.items():
        store = make_dataset(tmp_path / dtype, [DOCUMENTS], vocab_size)
        export_dataset(store, "megatron", tmp_path / f"{dtype}-out")
        places += [store.directory / "00000", tmp_path / f"{dtype}-out" / "00000"]
    read = ask_peer(python, READ_MEGATRON, *places)
    expected = [[DOCUMENTS, list(range(6)), dtype] for dtype in WIDTHS]
    assert read == [expected[0]] * 4 + [expected[1]] * 4


def test_what_megatron_core_writes_is_imported(tmp_path):
    python = peer_python("megatron.core", "torch")
    ask_peer(python, WRITE_MEGATRON, tmp_path)
    for dtype, vocab_size in WIDTHS.items():
        tokenizer = load_tokenizer(tokenizer_file(tmp_path, vocab_size))
        Import("megatron", [tmp_path / dtype], tokenizer).into(tmp_path / f"{dtype}-back")
        store = TokenStore.open(tmp_path / f"{dtype}-back")
        assert documents_of(store) == [[[5, 6, 7, EOS], [8, EOS]]]
        assert store.dtype == np.dtype(dtype)


def test_datatrove_opens_exported_shards(tmp_path):
    python = peer_python("datatrove", "torch")
    documents = [document for document in DOCUMENTS if document]
    asked = []
    for dtype, vocab_size in WIDTHS.items():
        store = make_dataset(tmp_path / dtype, [documents], vocab_size)
        export_dataset(store, "datatrove", tmp_path / f"{dtype}-out")
        asked += [tmp_path / f"{dtype}-out" / "00000.ds", store.dtype.itemsize]
    flat = [token for document in documents for token in document]
    for rows in ask_peer(python, READ_DATATROVE, *asked):
        assert [ids for ids, _ in rows] == [flat[:5], flat[5:10]]
        assert rows[0][1] == [0, 1, 2, 0, 0]


def test_what_datatrove_tokenizes_is_imported(tmp_path):
    python = peer_python("datatrove", "tokenizers")
    tokenizer = tokenizer_file(tmp_path)
    ask_peer(python, WRITE_DATATROVE, tmp_path / "ds", tokenizer)
    Import("datatrove", [tmp_path / "ds"], load_tokenizer(tokenizer)).into(tmp_path / "back")
    store = TokenStore.open(tmp_path / "back")
    assert documents_of(store) == [[[5, 6, EOS], [7, EOS], [8, 9, 10, EOS]]]
    assert store.about["documents_without_eos"] == 0
