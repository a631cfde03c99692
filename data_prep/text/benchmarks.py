"""Benchmark prompts by name: one file of a dataset on the Hub each, at a fixed commit, so that all read the same."""

import os
from pathlib import Path
from typing import Annotated

from outrider.errors import UserError, reason
from outrider.settings import Place

# The name, and of its file: the dataset, the commit, the path.
_TABLE = """
mt_bench HuggingFaceH4/mt_bench_prompts b60d01a44377daa2d9434e50a91a9e4169a090d5 raw/question.jsonl
gsm8k openai/gsm8k e53f048856ff4f594e959d75785d2c2d37b678ee main/test-00000-of-00001.parquet
humaneval openai/openai_humaneval 7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544 openai_humaneval/test-00000-of-00001.parquet
alpaca tatsu-lab/alpaca dce01c9b08f87459cf36a430d809084718273017 data/train-00000-of-00001-a09b74b3ef9c3b56.parquet
cnn_dm abisee/cnn_dailymail 96df5e686bee6baa90b8bee7c28b81fa3fa6223d 3.0.0/test-00000-of-00001.parquet
xsum EdinburghNLP/xsum 7d4d486c2f8ef850b1a11aead99b894ff3dd7da9 data/test-00000-of-00001.parquet
wmt wmt/wmt14 b199e406369ec1b7634206d3ded5ba45de2fe696 de-en/test-00000-of-00001.parquet
"""
BENCHMARKS = {name: hub_file for name, *hub_file in map(str.split, _TABLE.strip().splitlines())}
_WHAT = f"a JSONL, JSON or parquet file of prompts, or one of {', '.join(BENCHMARKS)}, which the Hub has"
PromptFile = Annotated[str, Place(_WHAT, besides=tuple(BENCHMARKS))]
PromptSource = Annotated[str, Place(f"{_WHAT}, or python_stdlib", besides=("python_stdlib", *BENCHMARKS))]


def prompt_file(name: str, key: str = "prompts") -> Path:
    """The file of prompts that `name` is the path of, else that of the benchmark `name`, which is fetched once.

    Raises `UserError` naming the option `key` if there is no such file, or if it cannot be fetched.
    """
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):
        return path
    if name not in BENCHMARKS:
        raise UserError(f"{key}={name}: no such file; give {_WHAT}")
    from huggingface_hub import hf_hub_download

    dataset, commit, file = BENCHMARKS[name]
    try:
        return Path(hf_hub_download(dataset, file, repo_type="dataset", revision=commit))
    except Exception as error:  # whatever the Hub client or the network raises
        raise UserError(
            f"{key}={name}: cannot be fetched from the Hugging Face Hub ({type(error).__name__}: {reason(error)}); "
            f"download https://huggingface.co/datasets/{dataset}/resolve/{commit}/{file} where there is a network, and "
            f"give that file: {key}=FILE"
        ) from error
