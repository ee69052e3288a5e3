"""Every message kind has a sender (a constructor call) and a receiver (match, isinstance) in the product."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.source_tree import PRODUCT, product

from shared import codec

COMING = set[str]()  # kinds that nothing sends yet


def test_every_kind_has_a_sender_and_a_receiver() -> None:
    sent, received = set[str](), set[str]()
    for source in product():
        if source.name.split("/")[0] in PRODUCT:
            for node in source.nodes:
                if isinstance(node, ast.Call):
                    sent |= set(_names(node.func))
                received |= set(_matched(node))
    kinds = set(codec.KINDS)
    assert kinds - {codec.WIRE_NAMES.get(name, name) for name in sent} == COMING
    assert kinds - {codec.WIRE_NAMES.get(name, name) for name in received} == COMING


def _matched(node: ast.AST) -> Iterator[str]:
    """The classes for which a node tests."""
    tests = [node.cls] if isinstance(node, ast.MatchClass) else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        tests = [node.args[1]]
    for test in tests:
        for part in ast.walk(test):
            yield from _names(part)


def _names(node: ast.AST) -> Iterator[str]:
    """The class that a node names, by itself or as its module's."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
