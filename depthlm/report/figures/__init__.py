"""The figures of reports: each module draws one PNG, or none where nothing has been measured."""
