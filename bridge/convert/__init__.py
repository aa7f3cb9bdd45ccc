"""Existing models made to run chains; ``bridge.convert`` itself is the function.

``api`` has the functions; ``plan`` decides and applies; ``rules_*`` say what fits which module; ``swap`` changes
classes; ``borrowed`` and ``chains`` run.
"""

from bridge.convert.api import conversion_report, convert, revert
from bridge.convert.report import Report, Row

__all__ = ["Report", "Row", "conversion_report", "convert", "revert"]
