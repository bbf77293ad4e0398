from ..pictures import quick_pictures, rendered

__all__ = ["quick_pictures", "rendered"]
