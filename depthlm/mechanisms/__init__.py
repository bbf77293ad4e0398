"""The depth mechanisms, one file each: how layers read from and write to what earlier layers computed."""
