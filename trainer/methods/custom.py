"""Methods that live in somebody else's module."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from pydantic import ValidationError

from trainer.config_base import Section
from trainer.config_errors import ConfigError, config_error_sentence
from trainer.method_config import CustomConfig
from trainer.methods.base import Context, Method


class CustomMethod(Protocol):
    """How a method from elsewhere is made."""

    Options: type[Section]

    def __call__(self, options: Any, context: Context) -> Method:
        """A method with checked options."""
        ...


def build_custom(config: CustomConfig, context: Context) -> Method:
    """The method at `config.path` with its checked options."""
    method, options = find_custom(config)
    return method(options, context)


def find_custom(config: CustomConfig) -> tuple[CustomMethod, Section]:
    """The class at `config.path` (`package.module:Class`), and its checked options.

    The class is a `Method` whose constructor takes (options, context); its attribute `Options` is a
    `Section`, so that unknown keys are refused.

    Raises:
        ConfigError: no such module or class, not a method, or options that it does not allow.
    """
    module_name, class_name = config.path.split(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"path: found {config.path!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"path: found {config.path!r}, allowed a subclass of trainer.methods.Method")
    options = getattr(found, "Options", None)
    if not (isinstance(options, type) and issubclass(options, Section)):
        raise ConfigError(f"path: found {config.path!r}, allowed a class whose Options is a Section")
    try:
        return cast(CustomMethod, found), options.model_validate(config.options)
    except ValidationError as error:
        sentence = config_error_sentence(error, "", options).removeprefix(": ")
        raise ConfigError(f"options.{sentence}") from error
