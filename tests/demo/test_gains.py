"""What the embedded demo says of speed at its end."""

from __future__ import annotations

from gsd_kernels_cli import demo_command as demo


def contenders(**rates):
    named = {"plain": demo.PLAIN, "default": f"{demo.ASSISTED}its default", "five": f"{demo.ASSISTED}5 tokens"}
    named |= {"auto": demo.AUTO, "chain": "chain", "tree": "tree"}
    return [{"name": named[name], "tokens_per_second": rate} for name, rate in rates.items()]


def test_first_what_the_default_gains_against_transformers():
    first, *others, last = demo._gains(contenders(plain=2.0, default=4.0, five=5.0, chain=30.0, tree=8.0, auto=20.0))
    assert first == f"{demo.AUTO}: 10.00× transformers' plain decoding, 4.00× its assisted mode (5 tokens)"
    assert [line.split(":")[0] for line in others] == ["chain", "tree"]
    assert last == f"Of this package's own ways the fastest here is chain, at 1.50 times the rate of {demo.AUTO}."


def test_the_default_may_be_the_fastest():
    *_, last = demo._gains(contenders(plain=2.0, default=4.0, chain=3.0, auto=20.0))
    assert last == f"Of this package's own ways the fastest here is {demo.AUTO}."
