"""The model that ranks prompts by the length of their outputs, and its loss.

A scheduler needs an order, not a length, and an order is easier to learn (Fu et al., "Efficient LLM Scheduling by
Learning to Rank", NeurIPS '24). Letters: N prompts, T tokens of the longest prompt, E embedding width of the served
model, D width after projection, Q queries, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int


class Ranker(nnx.Module):
    """Scores prompts; longer outputs get higher scores.

    The token vectors of the served model are projected. A few learned queries each take a weighted mean of them, and a
    small network reads these means and the length of the prompt. Positions are not used.

    Args:
        vectors: the embedding table of the served model, which is not trained.
        rngs: source of the initial values.
        width: D.
        queries: Q.
        hidden: width of the hidden layer.
    """

    def __init__(
        self,
        vectors: Float[Array, "V E"],
        rngs: nnx.Rngs,
        *,
        width: int = 16,
        queries: int = 4,
        hidden: int = 32,
    ) -> None:
        embed = vectors.shape[1]
        self.vectors = nnx.Variable(vectors / jnp.std(vectors))
        self.projection = nnx.Param(jax.random.normal(rngs.params(), (embed, width)) / embed**0.5)
        self.queries = nnx.Param(0.1 * jax.random.normal(rngs.params(), (width, queries)))
        self.hidden = nnx.Linear(width * queries + 1, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def table(self) -> Float[Array, "V D"]:
        """Return the projected embedding: all that scoring needs of the served model."""
        return self.vectors[...] @ self.projection[...]

    def __call__(self, ids: Int[Array, "N T"], is_token: Bool[Array, "N T"]) -> Float[Array, "N"]:
        """Return the scores. Positions without `is_token` are padding; each prompt has at least one token."""
        tokens = self.table()[ids]  # [N, T, D]
        shares = jnp.where(is_token[:, :, None], tokens @ self.queries[...], -jnp.inf)
        means = jnp.einsum("ntq,ntd->nqd", jax.nn.softmax(shares, axis=1), tokens)
        length = jnp.log1p(jnp.sum(is_token, axis=1).astype(jnp.float32))
        seen = jnp.concatenate([means.reshape(means.shape[0], -1), length[:, None]], axis=1)
        return self.out(jax.nn.gelu(self.hidden(seen), approximate=True))[:, 0]


def list_mle(scores: Float[Array, "N"], lengths: Float[Array, "N"]) -> Float[Array, ""]:
    """Return the negative log probability of the true order, longest first, as the mean over its places.

    Places are drawn one after the other by softmax of the scores (Xia et al., "Listwise approach to learning to rank",
    ICML '08). Equal lengths keep their order.
    """
    ordered = scores[jnp.argsort(-lengths, stable=True)]
    rest = jax.lax.cumlogsumexp(ordered, reverse=True)  # over the prompts without a place
    return jnp.mean(rest - ordered)
