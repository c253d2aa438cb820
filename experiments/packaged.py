"""Approximate attention layers with their own projections, and attention alone of other packages.

All except SMYRF are from other packages: `pip install -e '.[lra-baselines]'`.
"""

from collections.abc import Callable, Iterable
from importlib import import_module

import torch
from torch import Tensor, nn

from experiments.smyrf import CLUSTER, Smyrf, clustered_attention

LANDMARKS = 64
PROJECTED = 256
HASHES, CHUNK = 2, 64
WINDOW = 64  # tokens to each side of a query, or of its chunk
# The defaults of the packages: tokens of a block and random blocks of a block row (BigBird),
# tokens of a cluster (routing), tokens of a bucket (Sinkhorn).
BIGBIRD_BLOCK, RANDOM_BLOCKS = 64, 3
ROUTED = 64
BUCKET = 64
# The lengths that layers take: multiples of these numbers of tokens,
MULTIPLES = {
    "reformer": CHUNK,
    "smyrf": CLUSTER,
    "longformer": 2 * WINDOW,
    "bigbird": BIGBIRD_BLOCK,
    "routing": ROUTED,
    "sinkhorn": BUCKET,
}
# and at least this many. For fewer blocks transformers computes full attention instead.
SHORTEST = {"bigbird": (2 * RANDOM_BLOCKS + 6) * BIGBIRD_BLOCK}


def refusal(name: str, seq_len: int) -> str | None:
    """Why a layer cannot compute sequences of this length; None if it can."""
    multiple, shortest = MULTIPLES.get(name, 1), SHORTEST.get(name, 1)
    if seq_len % multiple:
        return f"{name} needs a multiple of {multiple} tokens, got {seq_len}"
    if seq_len < shortest:
        return f"{name} needs at least {shortest} tokens, got {seq_len}"
    return None


def _check_length(name: str, seq_len: int) -> None:
    if reason := refusal(name, seq_len):
        raise ValueError(reason)


class Masked(nn.Module):
    """Calls a layer on x (batch, tokens, dim); inside: bool (batch, tokens) or None."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        return self.layer(x, mask=inside)


class Zeroed(Masked):
    """A layer without a mask: padding is set to 0."""

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        return self.layer(x if inside is None else x * inside[..., None])


def nystromformer(dim: int, heads: int, seq_len: int) -> Masked:
    """Xiong et al. 2021."""
    layer = _package("nystrom_attention").NystromAttention
    return Masked(layer(dim, dim // heads, heads, num_landmarks=LANDMARKS))


def performer(dim: int, heads: int, seq_len: int) -> Masked:
    """Choromanski et al. 2021."""
    layer = _package("performer_pytorch").SelfAttention
    return Masked(layer(dim, heads=heads, dim_head=dim // heads))


def linformer(dim: int, heads: int, seq_len: int) -> Masked:
    """Wang et al. 2020."""
    layer = _package("linformer").LinformerSelfAttention
    return Zeroed(layer(dim, seq_len, PROJECTED, heads))


class Hashed(nn.Module):
    """Reformer's attention between its projections, given which tokens are inside."""

    def __init__(self, attention: nn.Module, dim: int):
        super().__init__()
        self.attention, self.out = attention, nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        return self.out(self.attention(x, attention_mask=inside).hidden_states)


def reformer(dim: int, heads: int, seq_len: int) -> Hashed:
    """Kitaev, Kaiser, Levskaya 2020. Raises ValueError for a seq_len that chunks do not fill."""
    _check_length("reformer", seq_len)
    models = _package("transformers").models.reformer
    config = models.ReformerConfig(
        hidden_size=dim,
        num_attention_heads=heads,
        attention_head_size=dim // heads,
        num_hashes=HASHES,
        lsh_attn_chunk_length=CHUNK,
        lsh_num_chunks_after=1,
    )
    return Hashed(models.modeling_reformer.LSHSelfAttention(config), dim)


def smyrf(dim: int, heads: int, seq_len: int) -> Smyrf:
    """Daras et al. 2020. Raises ValueError for a seq_len that clusters do not fill."""
    _check_length("smyrf", seq_len)
    return Smyrf(dim, heads)


def _package(name: str):
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{package} is not installed: pip install -e '.[lra-baselines]'"
        ) from error


PACKAGED: dict[str, Callable[[int, int, int], nn.Module]] = {
    function.__name__: function
    for function in (nystromformer, performer, linformer, reformer, smyrf)
}


class Third(nn.Module):
    """Replaces a projection: x (..., 3 dim) -> its first, second or third part."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        dim = x.shape[-1] // 3
        return x.narrow(-1, self.index * dim, dim)  # Performer writes into it, unlike into a chunk


# Replacements of the projections of the packages, by their names there. Keys of Reformer are its
# queries.
STAND_INS = {
    **dict.fromkeys(("to_q", "query_key"), Third(0)),
    "to_k": Third(1),
    **dict.fromkeys(("to_v", "value"), Third(2)),
    **dict.fromkeys(("to_qkv", "to_out", "out"), nn.Identity()),
}


Bare = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def local_attention(query: Tensor, dropout_p: float) -> Bare:
    """Each chunk of WINDOW tokens attends itself and its two neighbours."""
    options = {"window_size": WINDOW, "look_forward": 1, "dropout": dropout_p, "autopad": True}
    return _package("local_attention").LocalAttention(**options)


class Given(nn.Module):
    """A projection that ignores its input and returns a given tensor."""

    def __init__(self, projected: Tensor):
        super().__init__()
        self.projected = projected

    def forward(self, x: Tensor) -> Tensor:
        return self.projected


def longformer(query: Tensor, dropout_p: float) -> Bare:
    """Beltagy, Peters, Cohan 2020, without global tokens: WINDOW tokens to each side."""
    heads, _, head_dim = query.shape[1:]
    models = _package("transformers").models.longformer
    config = models.LongformerConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        attention_window=[2 * WINDOW],
        attention_probs_dropout_prob=dropout_p,
    )
    layer = models.modeling_longformer.LongformerSelfAttention(config, 0)

    def attend(query, key, value, inside):
        # (seq, batch, dim), in which the layer scales queries in place.
        rows = [t.permute(2, 0, 1, 3).flatten(2).clone() for t in (query, key, value)]
        layer.query, layer.key, layer.value = map(Given, rows)
        outside = torch.zeros_like(query[:, 0, :, 0]) if inside is None else (~inside).to(query)
        out = layer(rows[0].transpose(0, 1), outside, is_index_masked=outside.bool())[0]
        return out.unflatten(-1, (heads, head_dim)).transpose(1, 2).to(query.dtype)

    return attend


def bigbird(query: Tensor, dropout_p: float) -> Bare:
    """Zaheer et al. 2020: three blocks around a query, the first, the last and random ones.

    In training mode, because otherwise transformers takes the first block in place of random ones.
    It has no dropout, and it writes all N² probabilities, most of them zero.
    """
    heads, seq_len, head_dim = query.shape[1:]
    models = _package("transformers").models.big_bird
    config = models.BigBirdConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        block_size=BIGBIRD_BLOCK,
        num_random_blocks=RANDOM_BLOCKS,
        max_position_embeddings=seq_len,
    )
    layer = models.modeling_big_bird.BigBirdBlockSparseAttention(config, seed=0)
    make_masks = models.BigBirdModel.create_masks_for_block_sparse_attn

    def attend(query, key, value, inside):
        rows = [t.transpose(1, 2).flatten(2) for t in (query, key, value)]
        layer.query, layer.key, layer.value = map(Given, rows)
        kept = torch.ones_like(query[:, 0, :, 0]) if inside is None else inside.to(query)
        blocks, band, queries, keys = make_masks(kept, BIGBIRD_BLOCK)
        out = layer(rows[0], band, queries, keys, blocks, blocks)[0]
        return out.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    return attend


def routing(query: Tensor, dropout_p: float) -> Bare:
    """Roy et al. 2021: queries and keys near the mean of a cluster, ROUTED of each.

    The means are those of the first call; in training the package moves them in every step.
    """
    heads, seq_len, head_dim = query.shape[1:]
    package = _package("routing_transformer.routing_transformer")
    sizes = (seq_len // ROUTED, ROUTED, heads, head_dim)
    layer = package.KmeansAttention(*sizes, dropout=dropout_p).to(query.device)
    layer.requires_grad_(False).eval()  # else each call computes new means
    layer.dropout.train()

    def attend(query, key, value, inside):
        out, _ = layer(*_zeroed((query, key, value), inside), inside)
        # It would ask the device in every call whether there are means.
        vars(layer.kmeans)["init"] = lambda x: None
        return out

    return attend


def sinkhorn(query: Tensor, dropout_p: float) -> Bare:
    """Tay et al. 2020: each bucket attends itself and a mixture of buckets, sorted for it.

    Release 0.11.4 of the package has the sorted keys in place of the sorted values, too.
    """
    heads, _, head_dim = query.shape[1:]
    package = _package("sinkhorn_transformer.sinkhorn_transformer")
    # All but the sizes as SinkhornTransformer sets them.
    layer = package.SinkhornAttention(
        bucket_size=BUCKET,
        dim=heads * head_dim,
        dim_heads=head_dim,
        heads=heads,
        max_seq_len=None,
        non_permutative=False,
        sinkhorn_iter=5,
        temperature=0.75,
        dropout=dropout_p,
    )
    return lambda query, key, value, inside: layer(*_zeroed((query, key, value), inside), inside)


def _zeroed(tensors: Iterable[Tensor], inside: Tensor | None) -> list[Tensor]:
    """Tensors (batch, heads, tokens, dim) with zeros for padding.

    Sinkhorn attention mixes padding into other keys, and in routing attention a query whose
    cluster has only padding attends to it.
    """
    if inside is None:
        return list(tensors)
    return [t * inside[:, None, :, None] for t in tensors]


# Layers without projections, or whose projections are not weights of the layer.
BARE: dict[str, Callable[[Tensor, float], Bare]] = {
    "local-attention": local_attention,
    "longformer": longformer,
    "bigbird": bigbird,
    "routing": routing,
    "sinkhorn": sinkhorn,
}


def without_projections(name: str, query: Tensor, dropout_p: float) -> Bare:
    """One of PACKAGED as attention alone, its weights frozen; or one of BARE.

    Args:
        name: of the layer.
        query: (batch, heads, seq_len, head_dim), for which the layer is made.
        dropout_p: with which it drops probabilities; of those that do.

    Returns:
        A function (query, key, value, inside) -> out; inside is bool (batch, seq_len) or None. The
        tensors (batch, heads, seq_len, head_dim) are copied into the layout of the packages.

    Raises:
        ImportError: Its package is not installed.
        ValueError: It cannot compute sequences of this length; see `refusal`.
    """
    _check_length(name, query.shape[2])
    if name in BARE:
        return BARE[name](query, dropout_p)
    heads, seq_len, head_dim = query.shape[1:]
    layer = PACKAGED[name](heads * head_dim, heads, seq_len)
    if isinstance(layer, Smyrf):
        return clustered_attention
    for parent in tuple(layer.modules()):
        for child in STAND_INS.keys() & dict(parent.named_children()).keys():
            setattr(parent, child, STAND_INS[child])
        if isinstance(own := getattr(parent, "dropout", None), float):
            vars(parent)["dropout"] = dropout_p
        elif isinstance(own, nn.Dropout):
            own.p = dropout_p
    layer = layer.to(query.device, query.dtype).requires_grad_(False)

    def attend(query, key, value, inside):
        tokens = torch.cat([t.transpose(1, 2).flatten(2) for t in (query, key, value)], -1)
        lower = query.dtype != torch.float32
        # Nystromformer mixes in constants of float32, which autocast alone allows.
        with torch.autocast(query.device.type, query.dtype, enabled=lower, cache_enabled=False):
            out = layer(tokens, inside).to(query.dtype)
        return out.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    return attend
