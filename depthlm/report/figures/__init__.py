"""The report's pictures: each draws one PNG, or none where nothing has been measured."""
