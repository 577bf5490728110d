"""The reward server: a scoring engine and the HTTP application around it. Importing it loads no torch."""

from rm_server.app import create_app
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings, load_settings

__all__ = ["ScoringService", "ServerSettings", "create_app", "load_settings"]
