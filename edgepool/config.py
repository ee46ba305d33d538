"""The model configuration: one validated record that every stage reads.

It holds no torch, so that the board (Python 3.8, no torch) reads the same record from a bundle's
manifest. `weight_shapes` and `state_specs` say which tensors a configuration implies: the first is
what a `model.pt` must contain, the second is the state that the exported graph takes and returns.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from .errors import BadInput

LAYER_TYPES = ("full", "window", "keypoints", "sparse")
PLANNED_LAYER_TYPES = ("linear", "hybrid")
ROPE_SCALINGS = ("linear", "llama3", "yarn")
# Inputs of the exported graph before the state (`state_specs`), all int32; see `Model.forward`.
STEP_INPUTS = ("input_ids", "page_table", "past_len", "new_len", "logit_rows")
MAX_LAYERS = 4096  # a damaged file may state any number, and some fields list every layer


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear`: position / factor. `llama3`: wavelength-dependent (Llama 3.1). `yarn`: NTK-by-parts
    with an attention factor (Peng et al. 2023, arXiv:2309.00071).
    """

    kind: str
    factor: float
    original_max_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Optional[float] = None
    truncate: bool = True

    @property
    def context(self) -> int:
        """Tokens that the factor stretches the original context to, as many as positions count."""
        longest = (1 << 31) - 1
        return int(min(longest, self.factor * min(self.original_max_context, longest)))


@dataclass(frozen=True)
class IndexConfig:
    """The pooled index of `sparse` layers (IndexPool, IndexPoolSelect).

    source      `keys`: pool the attention's own post-RoPE keys, per KV head; `learned`: projections
    heads, dim  index query heads and their size (`learned` only; `keys` takes the attention's own)
    ratio       keys per pool, r
    weighting   `mean`, `gate` (learned) or `query` (keys): weights of the keys in a pool
    post_norm   `none` or `l2`: restore the mean key norm after averaging
    fusion      multiply a pooled key by a learned matrix
    block       pools selected together
    top_k       tokens selected, beside sinks and window; a multiple of block * ratio
    share       per layer, the layer whose selection it uses (itself by default)
    """

    source: str = "keys"
    heads: int = 0
    dim: int = 0
    ratio: int = 4
    weighting: str = "mean"
    post_norm: str = "none"
    fusion: bool = False
    block: int = 4
    top_k: int = 880
    share: Tuple[int, ...] = ()

    @property
    def block_tokens(self) -> int:
        return self.block * self.ratio

    @property
    def top_blocks(self) -> int:
        return self.top_k // self.block_tokens


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    `rope_layers` says per layer whether queries and keys are rotated (all by default; SmolLM3
    leaves every fourth layer without position). A reader follows its donor, whose keys it scores.
    `kv_dtype` is the storage of KV pages and pooled index: `fp16` means unquantised, in the float
    type of the exported graph; `int8` one FP32 scale per vector.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Optional[RopeScaling] = None
    rope_layers: Tuple[bool, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    layer_types: Tuple[str, ...] = ()
    kv_donor: Tuple[int, ...] = ()
    index: IndexConfig = field(default_factory=IndexConfig)
    window: int = 128
    sinks: int = 16
    page_size: int = 16
    kv_dtype: str = "fp16"
    kv_rotation: str = "none"
    compression_ratio: int = 1
    weight_sparsity: float = 0.0
    bos_token_id: Optional[int] = None
    eos_token_ids: Tuple[int, ...] = ()
    chat_template: Optional[str] = None

    def __post_init__(self) -> None:
        countable = _is_int(self.num_layers) and self.num_layers <= MAX_LAYERS
        every = tuple(range(self.num_layers)) if countable else ()
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full",) * len(every))
        if not self.rope_layers:
            object.__setattr__(self, "rope_layers", (True,) * len(every))
        if not self.kv_donor:
            object.__setattr__(self, "kv_donor", every)
        if not self.index.share:
            object.__setattr__(self, "index", dataclasses.replace(self.index, share=every))
        _validate(self)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def index_heads(self) -> Tuple[int, int, int]:
        """(Hs, Hq, Di): selection heads, index queries per selection head, index head size."""
        if self.index.source == "keys":
            return self.num_kv_heads, self.group_size, self.head_dim
        return 1, self.index.heads, self.index.dim

    def is_donor(self, layer: int) -> bool:
        """Whether the layer owns KV pages (a reader takes another layer's)."""
        return self.kv_donor[layer] == layer

    def selects(self, layer: int) -> bool:
        """Whether a sparse layer scores the index itself (it may reuse an earlier selection)."""
        return self.layer_types[layer] == "sparse" and self.index.share[layer] == layer

    def owns_index(self, layer: int) -> bool:
        """Whether the layer writes a pooled index: a KV donor scored by itself or a reader."""
        return self.is_donor(layer) and any(
            self.selects(i) and self.kv_donor[i] == layer for i in range(self.num_layers)
        )

    def attended_tokens(self, layer: int, context: int) -> int:
        """The most tokens a query at the end of `context` tokens attends to in the layer."""
        kind = self.layer_types[layer]
        if kind == "full" or (kind == "window" and self.window == 0):
            return context
        if kind == "window":
            return min(context, self.sinks + self.window)
        local = self.window + self.index.block_tokens - 1
        return min(context, self.sinks + local + self.index.top_k)

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types, every key present."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Parse what `to_dict` wrote; raises BadInput for unknown keys, types and values."""
        data = dict(_record(cls, data, "config"))
        if data.get("rope_scaling") is not None:
            scaling = _record(RopeScaling, data["rope_scaling"], "config.rope_scaling")
            data["rope_scaling"] = RopeScaling(**scaling)
        if "index" in data:
            data["index"] = IndexConfig(**_record(IndexConfig, data["index"], "config.index"))
        return cls(**data)


@dataclass(frozen=True)
class StateSpec:
    """One state tensor of the exported graph.

    shape uses the symbols `batch` and `pages` for the sizes chosen at run time.
    dtype is `float` (the graph's own float type), `float32` or `int8`.
    """

    name: str
    shape: Tuple[Union[str, int], ...]
    dtype: str


def state_specs(config: ModelConfig) -> List[StateSpec]:
    """The graph's state inputs, in graph order; each has an output of the same name plus `_out`."""
    store = "int8" if config.kv_dtype == "int8" else "float"
    heads, _, dim = config.index_heads
    ratio, page = config.index.ratio, config.page_size
    specs: List[StateSpec] = []
    for i in range(config.num_layers):
        if config.owns_index(i):
            specs.append(StateSpec("tail.%d" % i, ("batch", ratio, 2, heads, dim), "float"))
            specs.append(
                StateSpec("index_pool.%d" % i, (heads, "pages", page // ratio, dim), store)
            )
            if store == "int8":
                specs.append(
                    StateSpec("index_scale.%d" % i, (heads, "pages", page // ratio), "float32")
                )
        if config.is_donor(i):
            pool = ("pages", config.num_kv_heads, page, config.head_dim)
            specs.append(StateSpec("k_pool.%d" % i, pool, store))
            specs.append(StateSpec("v_pool.%d" % i, pool, store))
            if store == "int8":
                specs.append(StateSpec("k_scale.%d" % i, pool[:3], "float32"))
                specs.append(StateSpec("v_scale.%d" % i, pool[:3], "float32"))
    return specs


def weight_shapes(config: ModelConfig) -> Dict[str, Tuple[int, ...]]:
    """Name and shape of every weight of the configuration, in the order they are used."""
    c = config
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Dict[str, Tuple[int, ...]] = {"embed.weight": (c.vocab_size, c.hidden_size)}

    def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        shapes[name + ".weight"] = (outputs, inputs)
        if bias:
            shapes[name + ".bias"] = (outputs,)

    for i in range(c.num_layers):
        layer = "layers.%d." % i
        shapes[layer + "attn_norm.weight"] = (c.hidden_size,)
        linear(layer + "q_proj", width, c.hidden_size, c.qkv_bias)
        if c.is_donor(i):
            linear(layer + "k_proj", kv_width, c.hidden_size, c.qkv_bias)
            linear(layer + "v_proj", kv_width, c.hidden_size, c.qkv_bias)
        linear(layer + "o_proj", c.hidden_size, width)
        if c.qk_norm:
            shapes[layer + "q_norm.weight"] = (c.head_dim,)
            if c.is_donor(i):
                shapes[layer + "k_norm.weight"] = (c.head_dim,)
        _index_shapes(c, i, shapes)
        shapes[layer + "mlp_norm.weight"] = (c.hidden_size,)
        linear(layer + "gate_proj", c.intermediate_size, c.hidden_size)
        linear(layer + "up_proj", c.intermediate_size, c.hidden_size)
        linear(layer + "down_proj", c.hidden_size, c.intermediate_size)
    shapes["norm.weight"] = (c.hidden_size,)
    if not c.tie_embeddings:
        linear("lm_head", c.vocab_size, c.hidden_size)
    return shapes


def _index_shapes(c: ModelConfig, layer: int, shapes: Dict[str, Tuple[int, ...]]) -> None:
    """Weights of the layer's index: scoring where it selects, pooling where it writes."""
    name = "layers.%d.index." % layer
    heads, queries, dim = c.index_heads
    if c.index.source == "learned" and c.selects(layer):
        shapes[name + "q_proj.weight"] = (queries * dim, c.hidden_size)
        shapes[name + "head_weights.weight"] = (queries, c.hidden_size)
    if not c.owns_index(layer):
        return
    if c.index.source == "learned":
        shapes[name + "k_proj.weight"] = (dim, c.hidden_size)
        shapes[name + "k_norm.weight"] = (dim,)
        shapes[name + "k_norm.bias"] = (dim,)
        if c.index.weighting == "gate":
            shapes[name + "gate_proj.weight"] = (dim, c.hidden_size)
    if c.index.weighting in ("gate", "query"):
        shapes[name + "ape"] = (c.index.ratio, heads, dim)
    if c.index.fusion:
        shapes[name + "fusion"] = (heads, dim, dim)


# ------------------------------------------------------------------------------- validation


def _validate(c: ModelConfig) -> None:
    positive = (
        "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
        "max_context page_size"
    )
    for name in positive.split():
        _need(
            _is_int(getattr(c, name)) and getattr(c, name) > 0,
            name,
            c,
            "a positive integer of 32 bits",
        )
    _need(c.num_layers <= MAX_LAYERS, "num_layers", c, "at most %d" % MAX_LAYERS)
    for name in ("window", "sinks"):
        _need(
            _is_int(getattr(c, name)) and getattr(c, name) >= 0,
            name,
            c,
            "an integer >= 0 of 32 bits",
        )
    for name in ("rms_norm_eps", "rope_theta"):
        _need(_is_number(getattr(c, name)) and getattr(c, name) > 0, name, c, "a positive number")
    for name in ("tie_embeddings", "qkv_bias", "qk_norm"):
        _need(isinstance(getattr(c, name), bool), name, c, "true or false")
    _need(c.num_heads % c.num_kv_heads == 0, "num_heads", c, "a multiple of num_kv_heads")
    _need(c.head_dim % 2 == 0, "head_dim", c, "even (rotary embeddings turn pairs)")
    _need(
        c.kv_dtype in ("fp16", "int8"), "kv_dtype", c, "fp16 or int8 (int4 is not implemented yet)"
    )
    _need(c.kv_rotation == "none", "kv_rotation", c, "none (rotations are not implemented yet)")
    _need(c.compression_ratio == 1, "compression_ratio", c, "1 (the codec is not implemented yet)")
    sparsity = c.weight_sparsity
    _need(_is_number(sparsity) and 0 <= sparsity < 1, "weight_sparsity", c, "in [0, 1)")
    _need(
        c.bos_token_id is None or _is_token(c.bos_token_id, c),
        "bos_token_id",
        c,
        "a token id or null",
    )
    _need(
        all(_is_token(t, c) for t in c.eos_token_ids),
        "eos_token_ids",
        c,
        "token ids of the vocabulary",
    )
    template = c.chat_template
    _need(template is None or isinstance(template, str), "chat_template", c, "a string or null")
    _validate_layers(c)
    _validate_index(c)
    if any(kind in ("sparse", "keypoints") for kind in c.layer_types):
        _validate_blocks(c)
    if c.rope_scaling is not None:
        _validate_rope(c.rope_scaling)


def _validate_layers(c: ModelConfig) -> None:
    _need(len(c.layer_types) == c.num_layers, "layer_types", c, "one entry per layer")
    for kind in c.layer_types:
        if kind in PLANNED_LAYER_TYPES:
            raise BadInput("config.layer_types: '%s' layers are not implemented yet" % kind)
        if kind not in LAYER_TYPES:
            raise BadInput(
                "config.layer_types: unknown kind %r%s" % (kind, suggest(str(kind), LAYER_TYPES))
            )
    _need(len(c.rope_layers) == c.num_layers, "rope_layers", c, "one entry per layer")
    _need(
        all(isinstance(r, bool) for r in c.rope_layers), "rope_layers", c, "true or false per layer"
    )
    _need(len(c.kv_donor) == c.num_layers, "kv_donor", c, "one entry per layer")
    for i, donor in enumerate(c.kv_donor):
        ok = _is_int(donor) and 0 <= donor <= i and c.kv_donor[donor] == donor
        _need(ok, "kv_donor", c, "an earlier layer that owns its KV, or the layer itself")
        same = c.layer_types[donor] == c.layer_types[i]
        _need(same, "kv_donor", c, "a layer of the same attention type (layer %d)" % i)
        same = c.rope_layers[donor] == c.rope_layers[i]
        _need(same, "rope_layers", c, "equal for a reader and its donor (layer %d)" % i)


def _validate_index(c: ModelConfig) -> None:
    x = c.index
    for name in ("ratio", "block", "top_k"):
        value = getattr(x, name)
        _need(_is_int(value) and value > 0, "index." + name, c, "a positive integer of 32 bits")
    _need(x.source in ("keys", "learned"), "index.source", c, "keys or learned")
    allowed = ("mean", "query") if x.source == "keys" else ("mean", "gate")
    what = "%s with source '%s'" % (" or ".join(allowed), x.source)
    _need(x.weighting in allowed, "index.weighting", c, what)
    _need(x.post_norm in ("none", "l2"), "index.post_norm", c, "none or l2")
    _need(isinstance(x.fusion, bool), "index.fusion", c, "true or false")
    if x.source == "learned":
        for name in ("heads", "dim"):
            value = getattr(x, name)
            _need(_is_int(value) and value > 0, "index." + name, c, "a positive integer of 32 bits")
    _need(len(x.share) == c.num_layers, "index.share", c, "one entry per layer")
    for i, source in enumerate(x.share):
        ok = _is_int(source) and 0 <= source <= i and x.share[source] == source
        _need(ok, "index.share", c, "an earlier layer that selects, or the layer itself")
        same = source == i or (c.layer_types[source] == c.layer_types[i] == "sparse")
        _need(same, "index.share", c, "a sparse layer for a sparse layer (layer %d)" % i)


def _validate_blocks(c: ModelConfig) -> None:
    """What the index of a layer that selects blocks demands of the sizes around it."""
    x, tokens = c.index, c.index.block_tokens
    _need(c.page_size % x.ratio == 0, "page_size", c, "a multiple of index.ratio (%d)" % x.ratio)
    _need(c.page_size % tokens == 0, "page_size", c, "a multiple of block * ratio (%d)" % tokens)
    _need(c.sinks % tokens == 0, "sinks", c, "a multiple of block * ratio (%d)" % tokens)
    _need(x.top_k % tokens == 0, "index.top_k", c, "a multiple of block * ratio (%d)" % tokens)
    below = "below 1 / index.ratio (%g)" % (1 / x.ratio)
    _need(c.weight_sparsity < 1 / x.ratio, "weight_sparsity", c, below)


def _validate_rope(s: RopeScaling) -> None:
    if s.kind not in ROPE_SCALINGS:
        raise BadInput(
            "config.rope_scaling.kind: %r is not implemented (there are %s)"
            % (s.kind, ", ".join(ROPE_SCALINGS))
        )
    positive = (
        "factor original_max_context low_freq_factor high_freq_factor beta_fast beta_slow "
        "attention_factor"
    )
    for name in positive.split():
        value = getattr(s, name)
        absent = name == "attention_factor" and value is None
        if not (absent or (_is_number(value) and value > 0)):
            raise BadInput("config.rope_scaling.%s: %r is not a positive number" % (name, value))
    if not isinstance(s.truncate, bool):
        raise BadInput("config.rope_scaling.truncate: %r is not true or false" % (s.truncate,))


def _need(ok: bool, name: str, config: ModelConfig, expected: str) -> None:
    if ok:
        return
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    raise BadInput("config.%s: %s is not %s" % (name, shown, expected))


def _is_int(value: Any) -> bool:
    """An integer that an attribute of an operator can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31


def _is_number(value: Any) -> bool:
    """A finite number within the range of float32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3e38


def _is_token(value: Any, config: ModelConfig) -> bool:
    return _is_int(value) and 0 <= value < config.vocab_size


def suggest(name: str, known: Any) -> str:
    """` (did you mean 'x'?)` for a mistyped name, or an empty string."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) or [n for n in known if name and name in n]
    return " (did you mean '%s'?)" % close[0] if close else ""


def _record(cls: Any, data: Any, where: str) -> Dict[str, Any]:
    """Keys of `data` checked against the dataclass; lists become tuples."""
    if not isinstance(data, Mapping):
        raise BadInput("%s: expected a table of settings, found %s" % (where, type(data).__name__))
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise BadInput("%s: unknown key %r%s" % (where, key, suggest(str(key), fields)))
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise BadInput("%s: key '%s' is missing" % (where, name))
        if (
            name in data
            and str(f.type).startswith("Tuple")
            and not isinstance(data[name], (list, tuple))
        ):
            raise BadInput("%s.%s: expected a list" % (where, name))
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
