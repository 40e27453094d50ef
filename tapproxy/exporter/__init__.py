"""The admin port of a tap: metrics of its records, the last records, health."""

from tapproxy.exporter.admin import admin_app
from tapproxy.exporter.metrics import Exporter

__all__ = ["Exporter", "admin_app"]
