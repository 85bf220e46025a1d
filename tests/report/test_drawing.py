"""A step's picture: the right nodes and edges, and files that open."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from models import noised, prompts, tiny

from gsd_kernels import GraphConfig
from gsd_kernels_cli.drawing import ACCEPTED, REJECTED, ROOT, UNCHECKED, StepPicture, draw_step
from gsd_kernels_hf import generate

pytestmark = pytest.mark.quick

CONFIG = GraphConfig(depth=4, width=4, branch=3, max_rows=12, merge_context=0)


@pytest.fixture(scope="module")
def steps():
    """Pictures of all steps of one generation, the merges that its graphs counted, and its new tokens."""
    target = tiny(dtype=torch.float32)
    inputs = prompts(1, 12)
    pictures, merges = [], []

    def observe(record):
        pictures.append(StepPicture.of(record))
        merges.append(int(record.graph.num_merges[0]))

    out = generate(
        target, **inputs, assistant_model=noised(target), graph_config=CONFIG, max_new_tokens=40, do_sample=False,
        observer=observe,
    )  # fmt: skip
    return pictures, merges, out[0, 12:].tolist()


def test_pictures_tell_what_happened(steps):
    pictures, merges, tokens = steps
    emitted = []
    for picture in pictures:
        token = {node.id: node.token_id for node in picture.nodes}
        emitted += [token[i] for i in picture.accepted[1:]] + [picture.next_token]
        kinds = {node.id: node.kind for node in picture.nodes}
        assert kinds[0] == ROOT and picture.accepted[0] == 0
        assert {i for i, kind in kinds.items() if kind == ACCEPTED} == set(picture.accepted[1:])
        assert sum(edge.accepted for edge in picture.edges) == len(picture.accepted) - 1
        children = [edge.target for edge in picture.edges if not edge.merged]
        assert sorted(children) == list(range(1, len(picture.nodes)))  # every node hangs on one primary edge
        assert all(edge.source < edge.target for edge in picture.edges)
    assert emitted == tokens
    assert [len(picture.merges) for picture in pictures] == merges
    kinds = {node.kind for picture in pictures for node in picture.nodes}
    assert kinds == {ROOT, ACCEPTED, REJECTED, UNCHECKED} and sum(merges) > 0


def groups(file):
    return [e.get("id") for e in ElementTree.parse(file).iter() if re.match(r"(node|edge)-", e.get("id", ""))]


def test_svg_has_every_node_and_edge_once(steps, tmp_path):
    picture = max(steps[0], key=lambda p: p.interest)
    svg, png = draw_step(picture, lambda t: f"${t}$", [tmp_path / "new" / "a.svg", tmp_path / "a.png"], "a title")
    wanted = [f"node-{node.id}" for node in picture.nodes] + ["node-next"]
    wanted += [f"edge-{edge.source}-{edge.target}" for edge in picture.edges] + [f"edge-{picture.accepted[-1]}-next"]
    assert sorted(groups(svg)) == sorted(wanted)
    text = svg.read_text()
    assert "a title" in text and "merge edge" in text
    assert all(f">${node.token_id}$<" in text for node in picture.nodes)
    data = png.read_bytes()
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert data.startswith(b"\x89PNG") and width > 800 and height > 200
