"""The write of an mHC sublayer and the read of the next."""
