"""The write of a sublayer of hyper-connections and the read of the next."""
