"""A model of lrattnres behind the interface of transformers; this file lies in every exported folder.

`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` imports it, and it imports lrattnres.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lrattnres.config import ModelConfig, parse
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, initialize


class LrattnresConfig(PretrainedConfig):
    """config.json of an exported folder; `lrattnres` holds what the model is made of."""

    model_type = "lrattnres"

    def __init__(self, lrattnres: dict[str, Any] | None = None, **words: Any):
        self.lrattnres = lrattnres
        super().__init__(**words)


class LrattnresForCausalLM(PreTrainedModel, GenerationMixin):
    """`forward` and `generate`, without a cache: each new token is a forward pass over all there is.

    A row is one document, and may be padded on the left or on the right, as `attention_mask` says: what a token attends
    to is then the row without its padding, and rotary positions count only by their differences.
    """

    config_class = LrattnresConfig
    base_model_prefix = "model"

    def __init__(self, config: LrattnresConfig):
        super().__init__(config)
        if config.lrattnres is None:
            raise ValueError(
                "config.lrattnres is not there: take the config.json of a folder that lrattnres wrote"
            )
        self.model = Transformer(parse(ModelConfig, config.lrattnres["model"]), BACKENDS["sdpa"])
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embedding

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Called for every module with weights that no file gave; the embedding is the first of them.

        A model from a configuration alone is drawn as a whole. What a file lacks is no reason to draw it: ValueError.
        """
        lacking = [
            name
            for name, weight in self.named_parameters()
            if not getattr(weight, "_is_hf_initialized", False)
        ]
        if lacking and len(lacking) < len(list(self.parameters())):
            raise ValueError(f"no weights for {', '.join(lacking)}: the folder is damaged")
        if module is self.model.embedding:
            initialize(self.model, seed=0)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits [B, T, vocabulary] for input_ids [B, T]; with labels [B, T], -100 for none, their mean cross-entropy.

        Raises ValueError for more tokens than the model's context, for a mask whose ones are not side by side in a row, for
        positions that do not count them, and for a cache.
        """
        context = self.model.config.context
        if past_key_values is not None or cache is not None or use_cache:
            raise ValueError("use_cache=True: this model has no cache here; write use_cache=False")
        if input_ids.shape[1] > context:
            raise ValueError(f"{input_ids.shape[1]} tokens: the model's context is {context}")
        documents = None
        if attention_mask is not None and not bool(attention_mask.all()):
            documents = _contiguous(attention_mask)
        if position_ids is not None:
            _check_positions(position_ids, documents)
        self.model.dtype = (
            self.model.embedding.weight.dtype
        )  # `from_pretrained` and `to` may have changed it
        logits = self.model(input_ids, self.model.mask(documents, *input_ids.shape))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)


def _contiguous(mask: Tensor) -> Tensor:
    """The mask [B, T] as document numbers: padding is a document of its own, which no token of the text sees."""
    numbers = mask.to(torch.int32)
    if mask.dim() != 2 or bool((numbers.diff(dim=1) == 1).sum(1).add(numbers[:, 0]).gt(1).any()):
        raise ValueError(
            "attention_mask: must be [B, T] with the ones of a row side by side; pad on one side only"
        )
    return numbers


def _check_positions(positions: Tensor, documents: Tensor | None) -> None:
    steps = positions.diff(dim=-1)
    if documents is not None:
        steps = steps[(documents[:, 1:] == 1) & (documents[:, :-1] == 1)]
    if bool((steps != 1).any()):
        raise ValueError("position_ids: must count the tokens of a row one by one")
