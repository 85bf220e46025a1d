"""Graph-structured speculative decoding as transformers' custom ``generate``: the model's own text, sooner.

The code is that of the package gsd-kernels. What drafts for a model stands in ``gsd_kernels.json`` of its folder.
"""

# transformers reads this file's imports before it runs it, and names modules as if pip knew them; not those in a try.
try:
    from gsd_kernels import custom_generate
except ImportError as error:
    if error.name != "gsd_kernels":  # it is there, and something that it needs is not
        raise
    raise ImportError(
        "custom_generate: this generate is the package gsd-kernels, which is not installed here, or too old. It is on "
        "no package index: in a clone of its repository run `pip install .`, or install a wheel. "
        "Without trust_remote_code=True the model loads all the same, and transformers' own generate serves it."
    ) from error


def generate(inputs=None, *args, model, **kwargs):  # by keyword: of a loaded folder the prompt may come by position
    """Generate as transformers' ``generate`` does, with the options of ``gsd_kernels.generate`` beside."""
    return custom_generate(inputs, *args, model=model, folder_code=__file__, **kwargs)
