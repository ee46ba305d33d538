"""`model.pt` files: read, written, imported from Hugging Face folders and GGUF, initialised."""

from .importer import Summary, import_checkpoint
from .initialise import byte_tokenizer, random_weights
from .model_pt import Checkpoint, load, save
from .retrofit import Retrofit
from .weights import LazyTensor

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "Retrofit",
    "Summary",
    "byte_tokenizer",
    "import_checkpoint",
    "load",
    "random_weights",
    "save",
]
