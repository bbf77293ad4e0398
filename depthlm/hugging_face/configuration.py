"""The configuration of a decoder in transformers: the config.json of an export."""

from typing import Any

from transformers import PretrainedConfig


class DepthLMConfig(PretrainedConfig):
    """Size, backbone and depth mechanism of a decoder, and the standard fields that tools expect, derived from them.

    size, backbone: the fields of `Size` and `Backbone`. loops: passes through the layers.
    mechanism: its name. connection, attention: the settings of the two classes that the modeling code names.
    end_of_text: the token that ends a document, if attention is limited to one document; else None.
    max_position_embeddings: sequence length of training; longer sequences are possible, since positions are computed.
    """

    model_type = "depthlm"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        size: dict[str, Any] | None = None,
        backbone: dict[str, Any] | None = None,
        loops: int = 1,
        mechanism: str = "",
        connection: dict[str, Any] | None = None,
        attention: dict[str, Any] | None = None,
        end_of_text: int | None = None,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.size, self.backbone, self.loops = size or {}, backbone or {}, loops
        self.mechanism, self.connection, self.attention = mechanism, connection or {}, attention or {}
        self.end_of_text, self.max_position_embeddings, self.use_cache = end_of_text, max_position_embeddings, use_cache
        # transformers also calls the constructor without arguments
        if size:
            # a cache has one layer for each pass through a layer
            kwargs["num_hidden_layers"] = loops * size["num_layers"]
            kwargs |= {key: size[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
            kwargs |= {"num_attention_heads": size["num_heads"], "num_key_value_heads": size["num_kv_heads"]}
            kwargs |= {"head_dim": size["head_size"], "initializer_range": size["init_std"]}
        if backbone:
            kwargs["tie_word_embeddings"] = backbone["tie_embeddings"]
        super().__init__(**kwargs)
