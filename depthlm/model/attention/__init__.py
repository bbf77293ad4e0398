"""The attentions: which keys and values of earlier layers an attention uses, and the mixers of tokens."""
